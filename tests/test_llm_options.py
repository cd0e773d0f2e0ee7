"""Options of `LLM` that cannot work are refused by name, if possible before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from soothsay import LLM, Drafter, DrafterError, EngineConfig, ModelError, SamplingParams
from soothsay.config import EngineOptions
from soothsay.core.cache import kv_bytes
from soothsay.engine.sizing import WORKING_MEMORY, complete_config
from soothsay.machine import Memory
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.specs.state_specs import ConvolutionSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.numeric_mode import check_int8_kv

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_context", 0, "at least 2, or None"),
        ("max_context", -5, "at least 2, or None"),
        ("max_context", "3", "at least 2, or None"),
        ("max_context", True, "at least 2, or None"),
        ("kv_tokens", 0, "at least 1, or None"),
        ("kv_tokens", 1e6, "at least 1, or None"),
        ("snapshot_bytes", -1, "at least 0, or None"),
        ("max_tree", 0, "at least 1"),
        ("max_rows", None, "at least 1"),
        ("block_size", "16", "at least 1"),
    ],
)
def test_whole_numbers_of_the_engine(name: str, value: Any, expected: str) -> None:
    match = rf"^{name}={value!r} is not possible: it must be an integer, {expected}$"
    with pytest.raises(ModelError, match=match):
        EngineConfig(**{name: value})
    with pytest.raises(ValueError, match=match):  # there is no such model: options are looked at first
        LLM("/no/such/model", **{name: value})


def test_a_context_longer_than_the_models_is_told(tiny: Callable[..., Transformer]) -> None:
    longer = r"^max_context=600 is more than the 512 tokens that the model was made for: beyond these"
    with pytest.warns(UserWarning, match=longer):
        LLM(tiny(), max_context=600, kv_tokens=64).close()
    LLM(tiny(), max_context=512, kv_tokens=64).close()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("drafer", "^LLM has no option 'drafer'; did you mean drafter\\?$"),
        ("max_contxt", "did you mean max_context\\?$"),
        ("colour", "^LLM has no option 'colour'; it has drafter, .*, max_context, .*, engines$"),
        ("threads", r"torch\.set_num_threads"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        LLM("/no/such/model", **{name: 0})
    with pytest.raises(TypeError, match=f"^EngineConfig has no option '{name}'"):
        EngineConfig().with_options(**{name: 0})  # type: ignore[misc]
    with pytest.raises(TypeError, match=f"^EngineConfig has no option '{name}'"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize(("name", "value"), [("learn", "0.1"), ("learn", None), ("max_stall", "1")])
def test_other_numbers_of_the_engine(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"^{name}={value!r} is not possible"):
        EngineConfig(**{name: value})


def test_every_number_of_the_engine_is_a_keyword() -> None:
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)


def test_numbers_of_numpy(tiny: Callable[..., Transformer]) -> None:
    llm = LLM(tiny(), max_context=np.int64(64), kv_tokens=np.int32(64))
    assert len(llm.generate([1, 2, 3], GREEDY).token_ids) == 4


def test_a_kv_pool_beyond_the_memory(tiny: Callable[..., Transformer]) -> None:
    with pytest.raises(ModelError, match=r"^kv_tokens=1,000,000,000,000 .* GB.*; lower it, or leave it out"):
        LLM(tiny(), kv_tokens=10**12)


def test_engines_of_a_machine_share_its_memory(
    tiny: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [WORKING_MEMORY + 4_000_000]
    monkeypatch.setattr("soothsay.engine.sizing.memory_of", lambda device: Memory(free[0], "one GB"))
    model = tiny()
    bytes_each = kv_bytes(model.spec.kv_shapes, model.kv_dtype)
    for engines in (1, 2, 5):
        tokens = complete_config(EngineConfig(max_context=4096, engines=engines), model).kv_tokens
        assert tokens == 4_000_000 // 4 // engines // bytes_each // 16 * 16
    free[0] = WORKING_MEMORY
    with pytest.raises(ModelError, match=r"no memory of .* GB is left for the KV pool"):
        LLM(model)


def test_keys_and_values_in_int8_take_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "soothsay.engine.sizing.memory_of", lambda device: Memory(WORKING_MEMORY + 4_000_000, "")
    )
    options = {"dtype": "bfloat16", "drafter": "none"}
    tokens = [LLM("sibyl", kv_dtype=own, **options).config.kv_tokens for own in ("auto", "int8")]
    assert (tokens[1] or 0) / (tokens[0] or 1) > 1.75


def test_keys_and_values_that_cannot_be_in_int8(
    tiny: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"^kv_dtype 'int4' is unknown; choose auto, int8$"):
        LLM("sibyl", kv_dtype="int4")  # type: ignore[arg-type]
    kernels = StockKernels()
    spec = tiny(mixers={0: ConvolutionSpec(channels=64, taps=3)}).spec
    with pytest.raises(ModelError, match=r"keeps recurrent states\. Leave kv_dtype at auto"):
        check_int8_kv(spec, kernels)
    kernels.quantizes_kv = False
    with pytest.raises(ModelError, match=r"cannot keep KV in int8; leave kv_dtype at auto, or choose device"):
        check_int8_kv(tiny().spec, kernels)


@pytest.mark.parametrize("device", ["gpu", "", 3.5, None])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(ModelError, match=rf"^device={device!r} is no device: give 'auto', 'cpu', 'cuda' or"):
        LLM("sibyl", device=device)


def test_devices_that_are_not_here() -> None:
    with pytest.raises(ModelError, match=r"^device='cuda:99' cannot be used here \(.+\); choose 'cpu'"):
        LLM("sibyl", device="cuda:99")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(ModelError, match=r"^device='cuda' cannot be used here"):
        LLM("sibyl", device="cuda")


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        ("", ModelError, "^no model at ''"),
        (None, TypeError, "^a model is a path, a name or a Transformer, not None$"),
        (3, TypeError, "not an int$"),
    ],
)
def test_what_is_no_model(model: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LLM(model)


@pytest.mark.parametrize(
    ("drafter", "match"),
    [
        (3, "^drafter=3 is not possible: give a name"),
        (["suffix", "mtp"], r"^drafter=\['suffix', 'mtp'\] is not possible: .*'a > b'"),
        ({"name": "suffix"}, "is not possible: give a name"),
        (lambda target: None, "gave None, which is no Drafter"),
        (EngineConfig, None),
    ],
    ids=["number", "list", "dict", "function of nothing", "other class"],
)
def test_what_is_no_drafter(tiny: Callable[..., Transformer], drafter: Any, match: str | None) -> None:
    model = tiny()
    with pytest.raises((DrafterError, ModelError), match=match):
        LLM(model, drafter=drafter)
    llm = LLM(model, drafter="none")
    with pytest.raises((DrafterError, ModelError), match=match):
        llm.generate([[1, 2, 3]], GREEDY, drafter=[drafter])
    assert not llm.engine.has_work


def test_no_drafter_is_plain_decoding(tiny: Callable[..., Transformer]) -> None:
    llm = LLM(tiny(), drafter=None)
    assert llm.drafter == "none"
    assert llm.generate([1, 2, 3, 1, 2, 3], GREEDY).stats.drafted == 0


def test_a_drafter_that_is_made_already(tiny: Callable[..., Transformer]) -> None:
    llm = LLM(tiny(), drafter="none")
    made = llm._drafter("prompt-lookup")
    assert isinstance(made, Drafter)
    assert llm.generate([1, 2, 3], GREEDY, drafter=made) == llm.generate([1, 2, 3], GREEDY)
