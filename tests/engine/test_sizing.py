"""The engine's numbers that depend on the model and on the memory that is free."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from soothsay.config import EngineConfig
from soothsay.core.cache import kv_bytes
from soothsay.core.state_shape import StateShape
from soothsay.core.states import StatePool
from soothsay.engine import sizing
from soothsay.engine.sizing import (
    LEAST_TOKEN_BYTES,
    MEMORY_SHARE,
    STATE_SHARE,
    WORKING_MEMORY,
    complete_config,
)
from soothsay.errors import ModelError
from soothsay.machine import Memory
from soothsay.model.transformer import Transformer

SHAPES = [(2, 64)] * 4
LAYER = kv_bytes(SHAPES[:1], torch.float32)
"""Bytes that a token takes in one layer."""

HERE = platform.node()


def model(own: int = 4, states: Sequence[StateShape] = (), rest: Any = ()) -> Transformer:
    """A model with four layers, `own` of them in this process."""
    config = SimpleNamespace(
        max_positions=1 << 40,
        states=states,
        kv_shapes=SHAPES,
        state_bytes=lambda size: sum(state.state_bytes(size) for state in states),
        journal_bytes=lambda size: sum(state.journal_bytes(size) for state in states),
    )
    parts = {"own": SimpleNamespace(layers=range(own)), "rest": rest}
    dtypes = {"dtype": torch.float32, "kv_dtype": torch.float32, "device": torch.device("cpu")}
    return cast(Transformer, SimpleNamespace(spec=config, **parts, **dtypes))


def test_a_model_without_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens take no memory in the pool. There are no more than tables can hold."""
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", [(0, 0)] * 4)
    most = int(64_000 * LAYER / MEMORY_SHARE) // LEAST_TOKEN_BYTES
    free = complete_config(EngineConfig(), model())
    assert 0 < (free.kv_tokens or 0) <= most
    assert complete_config(EngineConfig(kv_memory="1MiB"), model()).kv_tokens == 2**20 // LEAST_TOKEN_BYTES


def stage(layers: range, tokens: int, machine: str) -> SimpleNamespace:
    """Layers elsewhere, with memory for so many tokens in one layer."""
    return SimpleNamespace(layers=layers, memory=enough(tokens), machine=machine)


def enough(tokens: int) -> int:
    """Free memory of which a pool may have as much as some tokens take in one layer."""
    return WORKING_MEMORY + int(tokens * LAYER / MEMORY_SHARE)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "memory_of", lambda device: Memory(enough(64_000), "this machine"))


@pytest.mark.parametrize(
    ("made", "engines", "tokens"),
    [
        (model(), 1, 16_000),
        (model(), 2, 8_000),
        (model(2, rest=[stage(range(2, 4), 64_000, "other")]), 1, 32_000),
        (model(2, rest=[stage(range(2, 4), 64_000, HERE)]), 1, 16_000),
        (model(3, rest=[stage(range(3, 4), 6_400, "other")]), 1, 6_400),
    ],
    ids=["alone", "two engines", "two machines", "two processes", "a small machine"],
)
def test_the_pool_is_what_the_tightest_machine_has_room_for(
    made: Transformer, engines: int, tokens: int
) -> None:
    assert complete_config(EngineConfig(engines=engines), made).kv_tokens == tokens


@pytest.mark.parametrize(("asked", "tokens"), [(32, 32), (33, 48)])
def test_a_given_size_is_rounded_up_to_blocks(asked: int, tokens: int) -> None:
    assert complete_config(EngineConfig(kv_tokens=asked), model()).kv_tokens == tokens


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        (4 * LAYER * 160, 160),
        ("1GiB", 2**30 // (4 * LAYER) // 16 * 16),
        ("1GB", 10**9 // (4 * LAYER) // 16 * 16),
        ("50%", 32_000),
        ("100 %", 64_000),
    ],
)
def test_a_size_in_memory_is_bytes_or_a_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, size: int | str, tokens: int
) -> None:
    monkeypatch.setattr(
        sizing, "memory_of", lambda device: Memory(max(enough(64_000), 2**31), "this machine")
    )
    if str(size).endswith("%"):
        monkeypatch.setattr(sizing, "memory_of", lambda device: Memory(enough(64_000), "this machine"))
    made = complete_config(EngineConfig(kv_memory=size, max_requests=1), model())
    assert (made.kv_tokens, made.kv_memory) == (tokens, None)
    assert replace(made, max_requests=2).kv_tokens == tokens


@pytest.mark.parametrize("size", ["4TiB", 4 * 1024**4])
def test_a_size_beyond_what_is_free_is_refused(size: int | str) -> None:
    with pytest.raises(ModelError, match=r"^kv_memory=.* needs 4,398.0 GB, and what is free of this machine"):
        complete_config(EngineConfig(kv_memory=size), model())


def test_a_size_below_one_block_is_refused() -> None:
    with pytest.raises(ModelError, match=f"kv_memory='1KiB' is too small: 16 tokens take {64 * LAYER:,} b"):
        complete_config(EngineConfig(kv_memory="1KiB"), model())


@pytest.mark.parametrize("size", ["5X", "-1", "0", "", "200%", "0%", "%", "nan", "1e9", "0.5", True, 2.5e-3])
def test_what_is_no_size_of_memory_is_refused(size: Any) -> None:
    with pytest.raises(ModelError, match=r"is no size of memory: give bytes, such as 4GiB"):
        EngineConfig(kv_memory=size)


def test_a_pool_has_one_size() -> None:
    with pytest.raises(ModelError, match="give kv_tokens or kv_memory, not both"):
        EngineConfig(kv_memory="50%", kv_tokens=16)


def test_engines_share_the_memory_for_states() -> None:
    states = [StateShape(channels=4096, taps=4)] * 2
    one = 2 * (states[0].state_bytes(4) + EngineConfig.max_tree * states[0].journal_bytes(4))
    share = int(64_000 * LAYER / MEMORY_SHARE * STATE_SHARE)
    for engines in (1, 2):
        made = complete_config(EngineConfig(max_requests=1 << 20, engines=engines), model(states=states))
        assert made.max_requests == share // engines // one


def test_snapshots_take_no_more_than_the_share_of_states() -> None:
    states = [StateShape(channels=4096, taps=4)] * 2
    made = complete_config(EngineConfig(max_requests=1 << 20, max_tree=1), model(states=states))
    assert made.snapshot_bytes == int(64_000 * LAYER / MEMORY_SHARE * STATE_SHARE)


def test_states_and_journals_take_the_bytes_that_are_counted() -> None:
    shape = StateShape(channels=10, taps=2, matrices=(3, 2, 2), gates=3)
    layers = StatePool({0: shape, 2: shape}, 1, 0, 5, torch.float32, torch.device("cpu")).layers.values()
    assert sum(own.matrices.nbytes + own.inputs.nbytes for own in layers) == 2 * shape.state_bytes(4)
    assert sum(own.journal.nbytes + own.gates.nbytes for own in layers) == 2 * 5 * shape.journal_bytes(4)
