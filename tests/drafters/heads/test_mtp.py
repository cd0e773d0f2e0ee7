"""MTP modules against their formula."""

from __future__ import annotations

import pytest
from oracles import MiMoOracle, MTPOracle, SeveralOracle, make_mtp_head
from recurrent import STRESSES, Make, check_all

from soothsay.drafters.heads.mtp import MTP


@pytest.mark.parametrize("stress", STRESSES)
def test_guesses_are_the_formula_s(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_mtp_head(target)
    check_all(stress, target, head, MTPOracle, lambda t: MTP(t, head), branch=3)


def test_the_other_order_and_no_first_embedding(tiny: Make) -> None:
    target = tiny(0)
    head = make_mtp_head(target, hidden_first=True, zero_first=True)
    check_all("at ease", target, head, MiMoOracle, lambda t: MTP(t, head, 2, 3, 3), branch=3)


@pytest.mark.parametrize("stress", [stress for stress in STRESSES if "never" not in stress])
def test_several_modules(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_mtp_head(target, modules=3)
    check_all(stress, target, head, SeveralOracle, lambda t: MTP(t, head, 5, 2, 2), branch=2)
