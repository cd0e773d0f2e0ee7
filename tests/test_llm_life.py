"""The life of an `LLM` as a Python object: closing, pickling, what it says of itself, and lazy names."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

import soothsay
from soothsay import LLM, FinishReason, SamplingParams
from soothsay.model.transformer import Transformer
from soothsay.result import Stream

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)


class TestClosing:
    def test_frees_the_model_the_pool_and_the_drafters(self, tiny: Callable[..., Transformer]) -> None:
        with LLM(tiny(), drafter="prompt-lookup | recycling", kv_tokens=256) as llm:
            stream = llm.stream([1, 2, 3], GREEDY)
            next(iter(stream))
            freed = [weakref.ref(one) for one in (llm.model, llm.engine.cache, llm._drafter(llm.drafter))]
        gc.collect()
        assert [one() for one in freed] == [None, None, None]
        assert stream.result.finish_reason is FinishReason.CANCELLED
        assert len(stream.result.token_ids) >= 1
        stream.cancel()
        llm.close()  # a second call does nothing

    def test_later_use_gets_a_clear_error(self, tiny: Callable[..., Transformer]) -> None:
        llm = LLM(tiny())
        llm.close()
        for use in (
            lambda: llm.generate([1], GREEDY),
            lambda: llm.generate([[1], [2]], GREEDY),
            lambda: llm.stream([1], GREEDY),
            lambda: llm.requests([1], GREEDY),
            lambda: llm.engine.load,
            lambda: llm.engine.step(),
            lambda: llm.forget_learned(),
            lambda: llm.model,
            lambda: llm.__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"this LLM is closed; make another one"):
                use()
        assert "closed" in repr(llm)

    @pytest.mark.parametrize("wait", [lambda stream: None, Stream.cancel], ids=["step", "cancel"])
    def test_a_thread_that_waits_has_a_cancelled_answer(
        self,
        tiny: Callable[..., Transformer],
        monkeypatch: pytest.MonkeyPatch,
        wait: Callable[[Stream], None],
    ) -> None:
        llm, waits, reasons = LLM(tiny()), threading.Event(), list[FinishReason]()
        stream, check = llm.stream([1], GREEDY), llm.engine.lock.check
        thread = threading.Thread(target=lambda: (wait(stream), reasons.append(stream.choice.finish_reason)))
        monkeypatch.setattr(llm.engine.lock, "check", lambda: (check(), waits.set()))
        with llm.engine.lock:
            waits.clear()
            thread.start()
            assert waits.wait(10)
            llm.close()
        thread.join(10)
        assert reasons == [FinishReason.CANCELLED]

    def test_an_error_inside_closes_it(self, tiny: Callable[..., Transformer]) -> None:
        with pytest.raises(KeyError), LLM(tiny()) as llm:
            raise KeyError
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([1], GREEDY)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_copy_would_be_another_model(sibyl: LLM, copied: Callable[[LLM], object]) -> None:
    with pytest.raises(TypeError, match=r"an LLM cannot be pickled or copied.*in each process"):
        copied(sibyl)


def test_says_what_it_is(sibyl: LLM, tiny: Callable[..., Transformer]) -> None:
    shown = repr(sibyl)
    assert shown.startswith("<LLM 'sibyl', drafter='none': ")
    for part in ("activations float32", sibyl.model.kernels.name):
        assert part in shown
    assert repr(LLM(tiny(), drafter="suffix")).startswith("<LLM of a Transformer, drafter='suffix': ")


def test_names_that_are_loaded_late_are_listed() -> None:
    assert {*soothsay.api.__all__, "__version__"} <= {*dir(soothsay)}
    code = "import sys, soothsay; assert 'torch' not in sys.modules; print('LLM' in dir(soothsay))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
