"""The guarantee on models whose layers run in several processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch
from every_drafter import DRAFTERS, resolve
from families import random_oracle
from slow import distinct
from stages import KEY, stage_here
from test_guarantee import GREEDY, MIXED, SAMPLED, all_same, plain, preempt_often, prompts, same, watch

from soothsay import LLM, DrafterError, ModelError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.cache import KVPool, Move
from soothsay.errors import StageError
from soothsay.handshake import call
from soothsay.model.pipeline import pipeline, stage_process
from soothsay.model.pipeline.frames import Frame, read_moves, receive, send
from soothsay.model.pipeline.pipeline import RemoteStage, StageAddress, load_pipeline, read_key, split_layers
from soothsay.model.pipeline.stage_process import ServedStage, serve_engine
from soothsay.model.stage import PoolSize, StagePass
from soothsay.model.timing.pass_measuring import measure_passes
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

QUICK = ("auto", "mtp", "layer-skip(skip=2)", "suffix > eagle3")


def piped(model: str | Path = "sibyl", dtype: str = "int8", stages: int = 2, **options: object) -> LLM:
    options = {"drafter": "none", "kv_tokens": 8192, **options}
    return LLM(model, dtype=dtype, stages=[stage_here() for _ in range(stages - 1)], **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine whose pool is too small for all requests together."""
    longest = max(map(len, prompts())) + (GREEDY.max_tokens or 0)
    made = piped(kv_tokens=longest + 400, block_size=8)
    preempt_often(made)
    yield made
    made.model.rest[0].close()


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(drafter, marks=() if drafter in QUICK else pytest.mark.slow)
        for drafter in [*DRAFTERS, QUICK[2]]
        if not drafter.startswith("assistant")  # it reads keys and values of the target, which are elsewhere
    ],
)
def test_drafters_change_nothing(llm: LLM, drafter: str) -> None:
    """At T = 0 and 1, with taps, preemption, chunks of prompts and prefix hits."""
    requests = watch(llm)
    spec = resolve(drafter)
    for _ in range(2):  # prefixes are found in the second round
        all_same(llm.generate(prompts(), MIXED, drafter=spec), "int8")
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_prefix_hits for request in requests) > 0


@pytest.mark.parametrize(
    "dtype", [*distinct("float32", "bfloat16")[-1:], pytest.param("int4", marks=pytest.mark.slow)]
)
def test_number_formats(dtype: str) -> None:
    all_same(piped(dtype=dtype).generate(prompts(), MIXED, drafter="suffix"), dtype)


def test_each_process_has_its_own_layers_only() -> None:
    llm = piped(dtype="float32")
    own, (rest,) = llm.model.own.layers, llm.model.rest
    assert [*own, *rest.layers] == [*range(llm.model.spec.num_layers)]
    assert len(llm.model.blocks) == len(own) > 0
    assert len(llm.engine.cache.layers) == len(own)
    held = sum(part.numel() for part in llm.model.blocks.parameters())
    whole = LLM("sibyl", dtype="float32", drafter="none").model.blocks
    assert held < sum(part.numel() for part in whole.parameters()) * (len(own) + 1) / len(whole)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4", "gemma3", "deepseek_v3", "qwen3_moe"])
def test_families(family: str, tmp_path: Path) -> None:
    """States, shared keys and values, embeddings of layers, windows, latent states and experts."""
    random_oracle(family, max_position_embeddings=256).save_pretrained(tmp_path)
    asked: Sequence[list[int]] = [[*range(20, 32)] * 4, [5, 6, 7], [*range(60)], [*range(20, 32)] * 4]
    modes = [replace(mode, max_tokens=12, ignore_eos=True) for mode in (GREEDY, SAMPLED, GREEDY, SAMPLED)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        alone = LLM(tmp_path, dtype="float32", drafter="none", kv_tokens=512, prefix_caching=False)
        llm = piped(tmp_path, "float32", kv_tokens=128, block_size=8, max_rows=40)
    expected = [alone.generate(ids, mode) for ids, mode in zip(asked, modes, strict=True)]
    requests = watch(llm)
    for drafter in ("suffix", "layer-skip(skip=0)"):
        for result, reference in zip(llm.generate(asked, modes, drafter=drafter), expected, strict=True):
            same(result, reference)
    assert sum(request.num_prefix_hits > 0 for request in requests) > 0


def test_a_pass_within_itself_and_taps_of_all_layers() -> None:
    alone, llm = LLM("sibyl", dtype="int8", drafter="none").model, piped(stages=3).model
    rows = [Rows(torch.arange(5, 25).numpy(), 0), Rows(torch.arange(7).numpy(), 0)]
    taps = range(alone.spec.num_layers + 1)
    with torch.inference_mode():
        hidden, tapped = alone(alone.pack(rows), taps=taps)
        found, found_taps = llm(llm.pack(rows), taps=taps)
        assert torch.equal(hidden, found)
        assert all(map(torch.equal, tapped, found_taps))
        skipping = [layer for layer in taps[:-1] if layer not in llm.rest[0].layers]
        assert torch.equal(
            alone(alone.pack(rows), layers=skipping)[0], llm(llm.pack(rows), layers=skipping)[0]
        )


def test_pass_times_are_of_all_stages() -> None:
    times = measure_passes(piped().model, 256, repeats=1)
    assert times(64) > 0


def test_processes_of_this_machine_end_with_the_model() -> None:
    llm = LLM("sibyl", dtype="int8", drafter="suffix", stages=2, kv_tokens=2048)
    same(llm.generate(prompts()[1], MIXED[1]), plain("int8")[1])
    pid = process_of(llm)
    assert os.getsid(pid) == pid, "a signal of the terminal does not reach it"
    del llm
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def process_of(llm: LLM) -> int:
    (rest,) = llm.model.rest
    assert isinstance(rest, RemoteStage)
    found = re.fullmatch(r"process (\d+)", rest.place)
    assert found is not None
    return int(found[1])


def test_a_stage_that_dies_is_named() -> None:
    llm = LLM("sibyl", dtype="int8", drafter="none", stages=2, kv_tokens=2048)
    stream = llm.stream(prompts()[0], GREEDY)
    next(iter(stream))
    os.kill(process_of(llm), signal.SIGKILL)
    with pytest.raises(StageError, match=r"stage with layers \d+ to 7 \(process \d+\) is lost"):
        list(stream)
    with pytest.raises(StageError):
        llm.generate("Hello!")


def test_a_stage_that_talks_nonsense_is_left() -> None:
    ours, theirs = Pipe()
    with theirs:
        stage = RemoteStage(ours, "here")
        stage.load(range(2, 4))
        theirs.send_bytes(b"nonsense")
        with pytest.raises(StageError, match=r"layers 2 to 3 \(here\) is lost: not a frame"):
            stage.wait("")
        assert ours.closed


def test_a_failing_step_is_blamed_on_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a stage is like one here: the others get their answers."""
    run = RemoteStage.run

    def run_badly(self: RemoteStage, at: StagePass) -> object:
        return run(self, at._replace(x=at.x[:, 1:]) if 31 in at.batch.tokens.tolist() else at)

    monkeypatch.setattr(RemoteStage, "run", run_badly)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    bad, good = llm.generate([[5, 31], [5, 6]], params)
    assert "hidden states of the shape" in (bad.choices[0].error or "")
    assert good.finish_reason == "length"


def test_a_commit_that_failed_is_told_with_the_next_pass(llm: LLM) -> None:
    """Once, and the step is repeated. Else tokens would come of keys and values that were never moved."""
    (stage,), cache = llm.model.rest, llm.engine.cache
    lost = Move(np.array([1 << 40]), [5], 3)  # within a block that the pool does not have
    rows = [Rows(np.arange(5, 9), 0, np.array([0]))]
    with torch.inference_mode():
        stage.commit(cache, [lost])
        stage.commit(cache, [Move(np.array([0]), [2], 3)])  # fails too, but the first failure is told
        stage.commit(cache, [Move(np.array([0]), [5], 3)])
        with pytest.raises(RuntimeError, match=r"stage with layers .*a block that the pool does not have"):
            llm.model(llm.model.pack(rows, cache.block_size), cache)
        llm.model(llm.model.pack(rows, cache.block_size), cache)
    failed = llm.engine.recovery.num_failed
    stage.commit(cache, [lost])
    same(llm.generate(prompts()[1], MIXED[1]), plain("int8")[1])
    assert llm.engine.recovery.num_failed == failed + 1


def test_a_pool_that_is_gone_here_is_gone_in_the_stage_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    act, counts = ServedStage.act, list[int]()

    def watched(self: ServedStage, frame: Frame) -> Frame | None:
        answer = act(self, frame)
        counts.append(len(self._pools))
        return answer

    monkeypatch.setattr(ServedStage, "act", watched)
    pools = [llm.model.new_cache(4, 8) for _ in range(3)]
    del pools[1:]
    gc.collect()
    llm.generate(prompts()[1], replace(GREEDY, max_tokens=1))
    assert counts[-1] == max(counts) - 2


def test_a_stage_that_cannot_load() -> None:
    with pytest.raises(ModelError, match="1 to 8 stages"):
        LLM("sibyl", stages=9)
    address = stage_here()
    one = RemoteStage(call(address.host, address.port, KEY), "here")
    options = {"model": "sibyl", "dtype": "float32", "max_context": None, "kv_dtype": "auto", "threads": 1}
    one.load(range(3, 8), kernels="z80", **options)
    with pytest.raises(ModelError, match=r"layers 3 to 7.*kernels 'z80'"):
        one.wait("")
    one.close()
    with pytest.raises(ModelError, match="CPUs only"):
        LLM("sibyl", stages=2, device="cuda")
    with pytest.raises(DrafterError):
        piped(drafter="nonsense")


def test_another_numeric_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = RemoteStage.load

    def load_stock(self: RemoteStage, layers: range, **options: object) -> None:
        load(self, layers, **{**options, "kernels": "stock"})

    monkeypatch.setattr(RemoteStage, "load", load_stock)
    with pytest.raises(ModelError, match="another numeric mode"):
        piped()


def test_stages_are_told_what_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is of this process's folder, and a stage may be in another one."""
    told = dict[str, object]()

    def load(self: RemoteStage, layers: range, **options: object) -> None:
        told.update(options)
        raise ModelError("that is all")

    monkeypatch.setattr(RemoteStage, "load", load)
    model = open_checkpoint("sibyl").path
    monkeypatch.chdir(model.parent)
    with pytest.raises(ModelError, match="that is all"):
        load_pipeline(f"./{model.name}", [stage_here()], "bfloat16", "portable", 77, "int8")
    assert told == {
        "model": str(model),
        "dtype": "bfloat16",
        "kernels": "portable",
        "max_context": 77,
        "kv_dtype": "int8",
        "threads": torch.get_num_threads(),
    }


def test_the_memory_of_a_stage_is_what_its_layers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    load, free = stage_process.load_stage, [2 << 40]

    def load_and_take_memory(*args: object) -> object:
        free[0] = 1 << 40
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_process, "load_stage", load_and_take_memory)
    monkeypatch.setattr(stage_process, "available_memory", lambda: free[0])
    (stage,) = load_pipeline("sibyl", [stage_here()]).rest
    assert stage.memory == 1 << 40
    stage.close()


@pytest.mark.parametrize("stages", ["localhost:1", ["localhost:1"], [2], 1.5, None])
def test_stages_that_are_no_places(stages: Any) -> None:
    with pytest.raises(TypeError, match=r"a list of places, not|a StageAddress, not"):
        LLM("sibyl", stages=stages)


def test_a_host_that_cannot_be_a_name() -> None:
    for host in ("a..b", 64 * "a"):
        with pytest.raises(ModelError, match=f"no stage answers at {host}:80"):
            StageAddress(host, 80, KEY).open()


@pytest.mark.parametrize("error", [TimeoutError("timed out"), socket.gaierror(-2, "unknown")])
def test_a_stage_that_cannot_be_reached_is_named(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> object:
        raise error

    monkeypatch.setattr(pipeline, "call", fail)
    with pytest.raises(ModelError, match="no stage answers at there:80"):
        StageAddress("there", 80, KEY).open()


def test_callers_need_the_key(tmp_path: Path) -> None:
    address = stage_here()
    with pytest.raises(ModelError, match="no stage answers"):
        load_pipeline("sibyl", [replace(address, key=b"another key, long enough")])
    for text in ("nowhere", ":80", "here:", "here:0", "here:-1", "here:65536"):
        with pytest.raises(ModelError, match="HOST:PORT"):
            StageAddress.parse(text, KEY)
    assert StageAddress.parse("here:65535", KEY) == StageAddress("here", 65535, KEY)
    assert StageAddress.parse("[::1]:80", KEY) == StageAddress("::1", 80, KEY)
    (tmp_path / "key").write_bytes(b"short\n")
    with pytest.raises(ModelError, match="5 bytes"):
        read_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(b" 16 bytes will do\n")
    assert read_key(tmp_path / "key") == b"16 bytes will do"
    assert KEY.decode() not in repr(address)


def test_layers_are_split_into_any_number_of_parts() -> None:
    config = read_model_config(open_checkpoint("sibyl"))
    for count in range(1, config.num_layers + 1):
        parts = split_layers(config, count)
        assert len(parts) == count
        assert all(parts)
        assert [layer for part in parts for layer in part] == [*range(config.num_layers)]
    large = replace(config, vocab_size=1000 * config.vocab_size)
    assert split_layers(large, 2)[0] == range(1), "its head is as large as all layers"
    small = replace(config, vocab_size=1)
    assert split_layers(small, 2)[0] == range(config.num_layers // 2)


def test_stages_are_closed_if_one_of_them_cannot_load() -> None:
    class Place:
        opened: RemoteStage | None = None

        def open(self) -> RemoteStage:
            self.opened = stage_here().open()
            return self.opened

    class Nowhere:
        def open(self) -> RemoteStage:
            raise ModelError("nobody is here")

    place = Place()
    with pytest.raises(ModelError, match="nobody is here"):
        load_pipeline("sibyl", [place, Nowhere()])
    assert place.opened is not None
    with pytest.raises(StageError):
        place.opened.wait("")


def test_layers_of_another_stage_are_refused(llm: LLM) -> None:
    (stage,), size = llm.model.rest, llm.model.spec.stream_size
    batch = llm.model.pack([Rows(np.arange(4), 0)])
    first, last = llm.model.own.layers[0], llm.model.spec.num_layers - 1
    for layers in ([first], [first, last], [last + 1], []):
        with pytest.raises(RuntimeError, match=r"layers \[.*\] of range"):
            stage.run(StagePass(torch.zeros(4, size), batch, None, layers, [], None))
    for shape in ((5, size), (3, size), (4, size + 1)):
        with pytest.raises(RuntimeError, match=r"hidden states of the shape .* for 4 rows"):
            stage.run(StagePass(torch.zeros(shape), batch, None, [last], [], None))
    assert stage.run(StagePass(torch.zeros(4, size), batch, None, [last], [], None))


def test_a_stage_that_has_said_what_is_no_frame_is_not_heard_any_more() -> None:
    ours, theirs = Pipe()
    stage = RemoteStage(ours, "here")
    theirs.send_bytes(b"what?")
    send(theirs, Frame("loaded", {"mode": "m", "memory": 1, "machine": ""}))
    for _ in range(2):
        with pytest.raises(StageError, match="is lost"):
            stage.wait("m")


def test_an_engine_that_does_not_wait_for_its_answer_ends_only_its_own_service() -> None:
    ours, theirs = Pipe()
    send(ours, Frame("load"))
    ours.close()
    serve_engine(theirs)  # the answer cannot be sent
    assert theirs.closed


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "GRACE", 0.01)
    process = Popen(["sleep", "1000"])
    RemoteStage(Pipe()[0], "here", process).close()
    assert process.returncode == -signal.SIGKILL


def test_pools_have_numbers_of_their_own_and_moves_go_together() -> None:
    """No two pools have a number, though one is gone. A request without news stands beside one with some."""
    ours, theirs = Pipe()
    stage, size = RemoteStage(ours, "here"), PoolSize(2, 4)
    pools = [KVPool([(2, 8)], 2, 4, torch.float32, torch.device("cpu")) for _ in range(3)]
    for pool in pools[:2]:
        stage.follow(pool, size)
    del pool, pools[0]
    stage.follow(pools[1], size)
    in_place, moved = Move(np.array([0]), [2], 2), Move(np.array([1]), [3], 2)
    stage.commit(pools[0], [in_place])
    stage.commit(pools[0], [in_place, moved])
    frames = list[Frame]()
    while theirs.poll():
        frames.append(receive(theirs))
    assert [frame.kind for frame in frames] == ["pool", "pool", "free", "pool", "commit"]
    first, kept, gone, last, committed = (frame.fields["pool"] for frame in frames)
    assert (gone, committed) == (first, kept)
    assert len({first, kept, last}) == 3
    assert [[*move.sources] for move in read_moves(frames[-1].tensors[0], 2)] == [[2], [3]]


def test_a_stage_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SILENCE", 0.01)
    ours, theirs = Pipe()
    with theirs, pytest.raises(StageError, match="it has said nothing"):
        RemoteStage(ours, "here").wait("m")
