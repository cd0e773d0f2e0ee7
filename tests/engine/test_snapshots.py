"""Snapshots of states: a request goes on from the state after exactly its own tokens, and no slot is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from soothsay import SamplingParams
from soothsay.core.request import Request
from soothsay.core.state_shape import StateShape
from soothsay.core.states import StatePool
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.drafters.base import NoDrafter
from soothsay.engine.snapshots import Snapshots

SIZE = 4
"""Tokens in a block."""

SHAPE = StateShape(channels=6, taps=2, matrices=(1, 2, 2), gates=1)


class Machine:
    """Stands for the model: the state after some tokens is a number of its own."""

    def __init__(self, requests: int = 3, snapshots: int = 4):
        self.pool = StatePool(
            {0: SHAPE, 2: SHAPE}, requests, snapshots, 8, torch.float32, torch.device("cpu")
        )
        self.snapshots = Snapshots(self.pool, SIZE)
        self.running: list[Request] = []
        self.known: set[bytes] = set()  # digests of blocks with keys and values
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, tokens: Sequence[int]) -> int:
        return self._numbers.setdefault(tuple(map(int, tokens)), len(self._numbers) + 1)

    def state(self, slot: int | None) -> int:
        """The number in a slot: the same in all layers and parts."""
        layers = self.pool.layers.values()
        (number,) = {*torch.cat([part[slot].flatten() for own in layers for part in own[:2]]).tolist()}
        return int(number)

    def write(self, slot: int | None, tokens: Sequence[int]) -> None:
        for own in self.pool.layers.values():
            own.matrices[slot], own.inputs[slot] = self.number(tokens), self.number(tokens)

    def start(self, request: Request) -> None:
        digests = [request.digest(block) for block in range(request.num_sharable // SIZE)]
        found = next((i for i, digest in enumerate(digests) if digest not in self.known), len(digests))
        request.cached = self.snapshots.usable(digests[:found]) * SIZE
        self.snapshots.start(request, found)
        self.running.append(request)
        if request.cached:
            assert self.state(request.state) == self.number(request.tokens[: request.cached])

    def read(self, request: Request, count: int, guesses: Sequence[int] = (), *, fail: bool = False) -> None:
        """A step that reads `count` tokens, and accepts `guesses` after them. `fail`: before its end."""
        begin, end = request.cached, request.cached + count
        text = [*request.tokens[:end].tolist(), *guesses]
        self.snapshots.mark(request, begin, end)
        self._run(request, text, begin, end)
        if end == len(request.tokens):
            self.snapshots.mark(request, end, len(text))
            self._run(request, text, end, len(text))
        if fail:
            self.stop(request)
            return
        if end == len(request.tokens):
            request.emit([*guesses, 1])
        request.cached = min(len(text), len(request.tokens))
        self.known |= {request.digest(block) for block in range(request.cached // SIZE)}
        self.snapshots.take_in(request)
        if request.finish_reason is not None:
            self.stop(request)

    def _run(self, request: Request, text: list[int], begin: int, end: int) -> None:
        """Compute the states that marks ask for, and the request's own."""
        for border, slot in request.marks:
            if begin < border <= end:
                self.write(slot, text[:border])
        self.write(request.state, text[:end])

    def stop(self, request: Request) -> None:
        self.snapshots.release(request)
        self.running.remove(request)
        request.cached = 0

    def serve(self, request: Request) -> Request:
        """Read a prompt from its begin to its end, and the first token of the answer."""
        self.start(request)
        self.read(request, request.num_pending)
        return request


def asked(prompt: Sequence[int], limit: int = 64, tenant: Tenant = EVERYBODY) -> Request:
    params = SamplingParams(max_tokens=limit)
    drafter = NoDrafter(None)  # type: ignore[arg-type]
    return Request(prompt, params, seed=0, limit=limit, drafter=drafter, block_size=SIZE, tenant=tenant)


@pytest.mark.parametrize("seed", range(8))
def test_requests_go_on_from_their_own_states_in_any_order_of_events(seed: int) -> None:
    """Requests over few tokens begin alike, go on, part, end within a draft, fail and are preempted."""
    rng = random.Random(seed)
    machine = Machine()
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(2, 30))] for _ in range(4)]
    hits = 0
    for _ in range(600):
        event = rng.random()
        if event < 0.3 and len(machine.running) < 3:
            prompt = [*rng.choice(prompts), *(rng.randrange(2) for _ in range(rng.randrange(6)))]
            if not any(machine.snapshots.find_coming(asked(prompt), 0, [own]) for own in machine.running):
                machine.start(asked(prompt, len(prompt) + rng.randrange(1, 20)))
                hits += machine.running[-1].cached > 0
        elif machine.running:
            request = rng.choice(machine.running)
            if event < 0.35:
                machine.stop(request)
                machine.start(request)
                continue
            count = min(request.num_pending, rng.randrange(1, 12))
            room = request.max_depth if count == request.num_pending else 0
            guesses = [rng.randrange(2) for _ in range(min(room + 2, rng.randrange(4)) if room else 0)]
            machine.read(request, count, guesses, fail=(fails := event > 0.95))
            if fails:
                machine.start(request)
    assert hits > 2
    for request in [*machine.running]:
        machine.stop(request)
    for _ in range(3):
        machine.start(asked([2] * 5))
    for request in [*machine.running]:
        machine.stop(request)
    latest = [asked([number] * 5) for number in range(3, 7)]
    for request in latest:
        machine.serve(request)
        machine.stop(request)
    assert [machine.snapshots.usable([own.digest(0)]) for own in latest] == [1] * 4, "no slot is lost"


def test_an_answer_that_ends_before_a_border_leaves_no_snapshot_of_it() -> None:
    """The draft reaches the border after 8 tokens, and the answer ends after 7."""
    machine = Machine(snapshots=1)
    request = asked([1, 2, 3], limit=7)
    machine.start(request)
    machine.read(request, 3, [4, 5, 6, 7, 8])
    assert request.finish_reason is not None
    assert len(request.tokens) == 7
    assert machine.snapshots.usable([request.digest(0), request.digest(1)]) == 0
    other = machine.serve(asked([9] * 5))
    assert machine.snapshots.usable([other.digest(0)]) == 1, "the slot is free"


def test_the_last_border_within_a_prompt_has_a_snapshot() -> None:
    for length, border in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        machine = Machine()
        request = machine.serve(asked(range(length)))
        digests = [request.digest(block) for block in range(length // SIZE)]
        assert machine.snapshots.usable(digests) == border


def test_an_answer_keeps_one_snapshot_which_moves_on() -> None:
    machine = Machine(snapshots=3)
    request = machine.serve(asked(range(6)))
    while len(request.tokens) < 22:
        machine.read(request, 1)
    usable = [machine.snapshots.usable([request.digest(i) for i in range(n)]) for n in range(6)]
    assert usable == [0, 1, 1, 1, 1, 5], "those of the prompt, and of the answer's last border"
    other = machine.serve(asked([30] * 5))
    assert machine.snapshots.usable([request.digest(0)]) == machine.snapshots.usable([other.digest(0)]) == 1


def test_requests_that_part_leave_a_snapshot_where_they_do() -> None:
    machine = Machine(snapshots=8)
    first = machine.serve(asked([*range(8), *range(20, 30)]))
    second = machine.serve(asked([*range(8), *range(40, 50)]))
    assert second.branch == 8
    third = asked([*range(8), *range(60, 70)])
    assert machine.snapshots.usable([third.digest(0), third.digest(1)]) == 2
    assert machine.snapshots.usable([first.digest(0)]) == 0
    machine.stop(first)
    machine.start(third)
    assert (third.cached, third.branch) == (8, 0)


def test_a_snapshot_at_the_end_of_a_prompt_stays_when_the_answer_leaves_another() -> None:
    machine = Machine()
    running, longer = asked(range(8)), asked([*range(8), 20, 21])
    machine.start(running)
    assert machine.snapshots.find_coming(longer, 0, machine.running) == (running, 8)
    machine.read(running, 8)
    while len(running.tokens) < 14:
        machine.read(running, 1)
    assert machine.snapshots.usable([longer.digest(0), longer.digest(1)]) == 2


def test_the_least_recently_used_snapshot_makes_room() -> None:
    machine = Machine(requests=9, snapshots=3)
    first, second, third = (machine.serve(asked([number] * 5)) for number in range(3))
    machine.serve(asked([0] * 6))  # goes on from the first one's
    machine.serve(asked([3] * 5))
    assert [machine.snapshots.usable([own.digest(0)]) for own in (first, second, third)] == [1, 0, 1]


def test_a_request_waits_for_a_snapshot_that_a_running_one_will_leave() -> None:
    machine = Machine()
    running = asked([*range(12), 20, 21])
    machine.start(running)
    same, other = asked([*range(12), 30, 31]), asked([7, *range(12)])
    tenants = asked([*range(12), 30, 31], tenant=Tenant("ann"))
    coming = [machine.snapshots.find_coming(own, 0, machine.running) for own in (other, tenants, same)]
    assert coming == [None, None, (running, 12)]
    assert running.branch == 12
    shorter = machine.snapshots.find_coming(asked([*range(8), 40, 41]), 0, machine.running)
    assert shorter == (running, 8)
    assert running.branch == 12, "the longest part that somebody waits for"
    assert not machine.snapshots.find_coming(same, 3, machine.running), "it can go on from there already"
    machine.read(running, 12)
    assert not machine.snapshots.find_coming(same, 0, machine.running), "the border was passed"
    assert machine.snapshots.usable([same.digest(block) for block in range(3)]) == 3


def test_a_step_that_fails_leaves_no_snapshot_and_frees_the_slots() -> None:
    machine = Machine(requests=1, snapshots=1)
    for _ in range(3):
        failed = asked([1] * 9)
        machine.start(failed)
        machine.read(failed, 9, fail=True)
        assert machine.snapshots.usable([failed.digest(0), failed.digest(1)]) == 0
    request = machine.serve(asked([2] * 5))
    assert machine.snapshots.usable([request.digest(0)]) == 1


def test_a_model_without_states_uses_all_blocks_and_waits_for_nobody() -> None:
    snapshots, request = Snapshots(None, SIZE), asked(range(9))
    assert snapshots.usable([request.digest(0), request.digest(1)]) == 2
    snapshots.start(request, 2)
    snapshots.mark(request, 0, 9)
    assert (request.state, request.marks, snapshots.exist) == (None, [], False)
    assert not snapshots.find_coming(asked(range(9)), 0, [request])
    snapshots.release(request)


def test_without_slots_for_snapshots_nothing_is_marked() -> None:
    machine = Machine(snapshots=0)
    request = machine.serve(asked(range(9)))
    assert machine.snapshots.usable([request.digest(0), request.digest(1)]) == 0
    assert not machine.snapshots.find_coming(asked(range(9)), 0, machine.running)


def test_kernels_are_not_given_slots_that_the_pool_lacks() -> None:
    pool = Machine(requests=2, snapshots=1).pool
    pool.check(1, 8, ((4, 2),))
    for slot, nodes, marks in ((None, 1, ()), (-1, 1, ()), (2, 1, ()), (0, 9, ()), (0, 1, ((4, 3),))):
        with pytest.raises(ValueError, match="no room"):
            pool.check(slot, nodes, marks)
    with pytest.raises(ValueError, match=r"slots \[-1\]"):
        pool.check(0, 1, ((4, -1), (8, 2)))


def test_layers_without_matrices_have_states_too() -> None:
    pool = StatePool({1: StateShape(channels=3, taps=3)}, 1, 1, 2, torch.bfloat16, torch.device("cpu"))
    pool.layers[1].inputs[0] = 5
    pool.copy(0, 1)
    assert pool.layers[1].inputs.tolist() == [[[5.0] * 3] * 2] * 2
