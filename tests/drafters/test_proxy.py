"""A proxy is to the engine what its drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from soothsay import LLM, DraftTree, Request, SamplingParams
from soothsay.drafters.base import Drafter, DrafterProxy

MEMBERS = sorted(name for name in vars(Drafter) if not name.startswith("_"))


class Noting(Drafter):
    """Notes calls; every attribute differs from the default."""

    taps = (1, 2)
    max_nodes = 5
    trained = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree(int(request.tokens[-1])) for request in requests]


def test_every_member_of_the_protocol_is_passed_on() -> None:
    """A member that is added to `Drafter`, and forgotten in the proxy, fails here."""
    drafter = Noting()
    proxy = DrafterProxy(drafter)
    assert {"taps", "max_nodes", "trained", "name", "propose", "observe", "authors", "release", "reset"} <= {
        *MEMBERS
    }
    for name in MEMBERS:
        drafter.__dict__[name] = marker = object()
        assert getattr(proxy, name) is marker, name


def test_what_is_set_on_a_proxy_is_set_on_its_drafter() -> None:
    drafter = Noting()
    proxy: Any = DrafterProxy(drafter)
    proxy.name, proxy.max_nodes = "mine", 7
    assert (drafter.name, drafter.max_nodes) == ("mine", 7)


def test_a_proxy_of_a_trained_drafter_is_watched_and_named_as_the_drafter() -> None:
    """Wrong guesses are reported under the drafter's name, and its right ones are credited to it."""

    class Wrong(Drafter):
        max_nodes, trained = 2, True

        def __init__(self) -> None:
            pass

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            trees = [DraftTree(int(request.tokens[-1])) for request in requests]
            for tree in trees:
                tree.extend([3])
            return trees

    llm = LLM("sibyl", drafter=DrafterProxy(Wrong()), max_context=256)
    with pytest.warns(UserWarning, match="Wrong guessed right in 0 of its first 100 steps"):
        llm.generate("Hello", SamplingParams(temperature=0, max_tokens=110, ignore_eos=True))
