"""Configurations of public models: each runs, or is refused for a reason that helps."""

from __future__ import annotations

from typing import Any

import pytest
from public_models import PAGE, public_configs, row

from soothsay.errors import ModelError
from soothsay.model.families.parsing import parse_model_config

CONFIGS = public_configs()


def test_there_are_enough_of_each_kind() -> None:
    assert len(CONFIGS) >= 80
    assert len({raw["model_type"] for raw in CONFIGS.values()}) >= 20


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_runs_or_is_refused_for_a_reason(name: str) -> None:
    raw: dict[str, Any] = CONFIGS[name]
    told = row(name, raw)
    assert "damaged" not in told
    assert "is not a family" not in told
    if "| no |" not in told:
        config = parse_model_config(raw)
        sizes = config.hidden_size, config.num_layers, config.vocab_size
        text = raw.get("text_config", raw)
        layers = text.get("num_hidden_layers", text.get("num_layers"))  # the second in EXAONE 3
        assert sizes == (text["hidden_size"], layers, text["vocab_size"])


def test_the_page_has_every_model() -> None:
    """Renew it by `python tests/helpers/public_models.py`."""
    page = PAGE.read_text()
    assert [name for name in CONFIGS if f"| {name} |" not in page] == []
    for name, raw in CONFIGS.items():  # a model that runs today may still be refused on the page
        if "| no |" in row(name, raw):
            assert row(name, raw) in page, name


def test_fields_of_unknown_families_are_not_judged() -> None:
    """Their fields may mean other things."""
    for raw in (
        {"model_type": "rwkv7"},
        {"model_type": "x", "text_config": {"model_type": "rwkv7"}},
    ):
        with pytest.raises(ModelError, match="attention"):
            parse_model_config({**raw, "hidden_size": "large"})
