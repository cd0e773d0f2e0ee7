"""Log-probabilities of prompts, for requests that want them."""

from collections.abc import Iterable

from torch import Tensor

from soothsay.core.turn import Turn
from soothsay.engine.verification import best_logprobs
from soothsay.model.transformer import Transformer

SCORED_ROWS = 64
"""Rows of a prompt whose logits are in memory at once. With a vocabulary of 150,000 tokens, 38 MB."""


def score(turns: Iterable[Turn], hidden: Tensor, model: Transformer) -> None:
    """Compute the `prompt_logprobs` of every turn that reads a part of a prompt for which they are wanted.

    Answers to the same prompt share them, and the first one to read a part computes it. They are a function
    of the prompt alone, so they stay right if the rest of the step fails.

    Args:
        turns: of one step, with `rows` set.
        hidden: `[N, H]`, what the model computed for all rows of the pass.
        model: makes logits of it.

    Example:
        A prompt of 5 tokens is read in chunks of 3 and 2. Rows 0, 1 and 2 say how likely tokens 1, 2 and 3
        were, and row 3 how likely token 4 was. Row 4 is the root of a tree, for the answer's first token.
    """
    for turn in turns:
        if turn.request.params.prompt_logprobs is not None and turn.request.num_unscored:
            _score(turn, hidden[turn.rows], model)


def _score(turn: Turn, hidden: Tensor, model: Transformer) -> None:
    """Add the log-probabilities of the tokens after this turn's rows of the prompt, `hidden` `[n, H]`.

    At least those of the tokens after `cached` are known, since the prefix cache is used only so far.
    """
    request = turn.request
    first = len(request.prompt_logprobs)  # the row that says how likely the next token is
    end = min(request.cached + turn.num_tokens, request.num_prompt - 1)
    for begin in range(first, end, SCORED_ROWS):
        stop = min(begin + SCORED_ROWS, end)
        logits = model.logits(hidden[begin - request.cached : stop - request.cached])
        tokens = request.tokens[begin + 1 : stop + 1].tolist()
        count = request.params.prompt_logprobs or 0
        request.prompt_logprobs.append(tokens, *best_logprobs(logits, tokens, count, model.kernels.sampling))
