"""The answers of examples as texts: where they begin and end, and how many there are."""

import numpy as np

from soothsay.train.examples import LEAD, Example, answer_texts


def example(tokens: range, *answers: range) -> Example:
    marks = np.array([any(token in one for one in answers) for token in tokens])
    return Example(np.array(tokens), marks)


def test_each_answer_is_a_text_with_the_tokens_before_it() -> None:
    texts = answer_texts(
        [example(range(20), range(8, 11), range(15, 20)), example(range(50, 53), range(51, 53))], 99
    )
    assert [text.tolist() for text in texts] == [
        [*range(8 - LEAD, 11)],
        [*range(15 - LEAD, 20)],
        [50, 51, 52],
    ]


def test_there_are_no_more_tokens_than_wanted() -> None:
    one = example(range(20), range(8, 11), range(15, 20))
    assert [len(text) for text in answer_texts([one, one], 9)] == [6, 3]
    assert [len(text) for text in answer_texts([one, one], 6)] == [6]
