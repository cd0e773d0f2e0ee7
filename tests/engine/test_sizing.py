"""The engine's numbers that depend on the model and on the memory that is free."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from soothsay.config import EngineConfig
from soothsay.core.kv_rows import kv_bytes
from soothsay.core.state_shape import StateShape
from soothsay.core.states import StatePool
from soothsay.engine import sizing
from soothsay.engine.sizing import MEMORY_SHARE, STATE_SHARE, WORKING_MEMORY, complete_config
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
