"""The guarantee on a model of which a Ray actor runs some layers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from every_drafter import resolve
from test_guarantee import GREEDY, MIXED, all_same, prompts

from soothsay import LLM
from soothsay.errors import StageError
from soothsay.model.pipeline.pipeline import RemoteStage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: soothsay[ray] is not installed"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_stages_are_actors_with_the_same_bits(cluster: None) -> None:
    """Drafters change nothing, also those that read the inputs of the actor's layers; a loss is named."""
    from soothsay.server.cluster.ray_stage import RayStage

    llm = LLM("sibyl", dtype="float32", stages=[RayStage()], drafter="none", kv_tokens=8192)
    own, (rest,) = llm.model.own.layers, llm.model.rest
    assert [*own, *rest.layers] == [*range(llm.model.spec.num_layers)]
    assert isinstance(rest, RemoteStage)
    assert rest.machine
    for drafter in ("none", "suffix", "eagle3", "mtp"):
        all_same(llm.generate(prompts(), MIXED, drafter=resolve(drafter)))
    pid = process_of(rest)
    stream = llm.stream(prompts()[0], GREEDY)
    next(iter(stream))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StageError, match=r"Ray actor, process \d+ on .* is lost"):
        list(stream)


def test_an_actor_ends_with_its_engine(cluster: None) -> None:
    from soothsay.server.cluster.ray_stage import RayStage

    stage = RayStage().open()
    pid = process_of(stage)
    assert Path(f"/proc/{pid}").exists()
    stage.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def process_of(stage: RemoteStage) -> int:
    found = re.fullmatch(r"Ray actor, process (\d+) on .*", stage.place)
    assert found is not None
    return int(found[1])
