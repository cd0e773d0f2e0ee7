"""From what a user writes to a drafter, and what he is told if he cannot have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernels import FASTEST

from soothsay import REGISTRY, DrafterError, ModelError
from soothsay.config import EngineConfig
from soothsay.drafters.base import NoDrafter, Target
from soothsay.drafters.control.compose import Cascade, Composite, Merged
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.lookup.exact_matches import PromptLookup
from soothsay.drafters.places import drafter_directory
from soothsay.drafters.registry import DrafterSpec, build_drafter, drafters_with_files

MODEL = SimpleNamespace(kernels=FASTEST, spec=SimpleNamespace(vocab_size=97, num_layers=2, hidden_size=48))
TARGET = Target(MODEL, None, EngineConfig(), 0)  # type: ignore[arg-type]


class Echo(NoDrafter):
    """Keeps the options that it is given."""

    def __init__(self, target: Target, text: Any, count: int = 3, share: float = 0.5):
        super().__init__(target)
        self.options = (text, count, share)


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "echo", Echo)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("echo(text=a)", ("a", 3, 0.5)),
        ("echo(text=a, count=5, share=0.25)", ("a", 5, 0.25)),
        (" echo ( count = -1 , text = two words ,) ", ("two words", -1, 0.5)),
        ("echo(text='quoted')", ("quoted", 3, 0.5)),
        ("echo(text=../models/a-b_c.d=e)", ("../models/a-b_c.d=e", 3, 0.5)),
        ("echo(text=True)", (True, 3, 0.5)),
        ("echo(text=None)", (None, 3, 0.5)),
        ("echo(text='a, b=(c', count=5)", ("a, b=(c", 5, 0.5)),
        ("echo(text=[1, 2], count=5)", ([1, 2], 5, 0.5)),
        ("echo(text=it's a > b, count=5)", ("it's a > b", 5, 0.5)),
        ("echo(text=f(x))", ("f(x)", 3, 0.5)),
        ("echo(text=\n  a,\n  count=2\n)", ("a", 2, 0.5)),
    ],
)
def test_options_are_literals_or_else_plain_text(spec: str, options: tuple[Any, ...]) -> None:
    drafter = build_drafter(spec, TARGET)
    assert isinstance(drafter, Echo)
    assert drafter.options == options


@pytest.mark.parametrize("spec", ["prompt-lookup", "prompt-lookup()", " prompt-lookup "])
def test_a_name_alone_has_the_defaults(spec: str) -> None:
    drafter = build_drafter(spec, TARGET)
    assert isinstance(drafter, PromptLookup)
    assert (drafter.max_ngram, drafter.min_ngram, drafter.num_tokens, drafter.num_matches) == (8, 2, 10, 3)


def test_a_drafter_that_is_made_is_taken_as_it_is() -> None:
    drafter = NoDrafter(TARGET)
    assert build_drafter(drafter, TARGET) is drafter


def test_a_class_or_any_other_maker_is_asked_directly() -> None:
    made = build_drafter(PromptLookup, TARGET)
    assert isinstance(made, PromptLookup)
    made = build_drafter(lambda target: Echo(target, text=target.num_blocks), TARGET)
    assert isinstance(made, Echo)
    assert made.options[0] == 0
    assert made.target is TARGET


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oracle", r"^drafter 'oracle' is unknown; choose from auto, none, prompt-lookup, .*echo"),
        ("Prompt-Lookup", r"^drafter 'Prompt-Lookup' is unknown; choose from auto, none, prompt-lookup"),
        ("echo(text=a, colour=red)", r"'echo' has no option 'colour'; its options are text, count, share$"),
        ("echo(target=a, text=b)", r"'echo' has no option 'target'"),
        ("none(text=a)", r"'none' has no option 'text'; it has no options$"),
        ("echo", r"^drafter 'echo' needs text: write echo\(text=\.\.\.\)$"),
        (
            "draft-model(depth=3)",
            r"^no model is named for draft-model, .*: write draft-model\(model=\.\.\.\)$",
        ),
        ("echo(a)", r"^drafter 'echo\(a\)': 'a' is not of the form key=value$"),
        ("echo(text=a", r"is not of the form name or name\(key=value, \.\.\.\), or several of them with"),
        ("none > ", r"^drafter 'none >': a drafter is missing beside '>'$"),
        ("| none", r"a drafter is missing beside '\|'$"),
        ("none + oracle", r"^drafter 'oracle' is unknown"),
        ("", r"^drafter '' is not of the form name"),
        ("echo text=a", r"is not of the form name"),
        ("echo(text=a, count=many)", r"^drafter 'echo': count='many' .* must be an integer$"),
        (
            "prompt-lookup(num_tokens=2.5)",
            r"^drafter 'prompt-lookup': num_tokens=2\.5 .* must be an integer$",
        ),
        ("prompt-lookup(num_tokens=0)", r"num_tokens=0.*at least 1$"),
        ("rest(store=1.5)", r"^drafter 'rest': store=1\.5 is not possible: it must be a text$"),
        ("rest(store=3)", r"\b3\b"),
        ("layer-skip(model=None)", r"^drafter 'layer-skip': model=None .* must be a text$"),
        ("eagle(template=3)", r"^template=3 is no tree: give paths of ranks, such as"),
        ("eagle(template=[[0, 0], [0]])", r"^template=\[\[0, 0\], \[0\]\] is no tree"),
        ("eagle(template=[[-1]])", r"is no tree"),
        ("eagle(template=[])", r"is no tree"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_choices(spec: str, message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        build_drafter(spec, TARGET)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("none > none", (Cascade, [NoDrafter, NoDrafter])),
        ("none+none + none", (Merged, [NoDrafter, NoDrafter, NoDrafter])),
        ("none | none", (Controller, [NoDrafter, NoDrafter])),
        ("none > prompt-lookup(num_tokens=3) + none", (Cascade, [NoDrafter, Merged])),
        ("none > none | none", (Controller, [Cascade, NoDrafter])),
    ],
)
def test_drafters_compose(spec: str, shape: tuple[type, list[type]]) -> None:
    made = build_drafter(spec, TARGET)
    assert isinstance(made, Composite)
    assert (type(made), [type(part) for part in made.parts]) == shape


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("none", "none"),
        (" prompt-lookup(num_tokens=3)", "prompt-lookup"),
        ("none>prompt-lookup(num_tokens=3)  + none", "none > prompt-lookup + none"),
        ("suffix | none", "suffix | none"),
        (PromptLookup, "PromptLookup"),
    ],
)
def test_a_drafter_is_called_as_it_was_specified(spec: DrafterSpec, name: str) -> None:
    made = build_drafter(spec, TARGET)
    assert made.name == name


def test_drafters_are_beside_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    (tmp_path / "drafters" / "eagle3").mkdir(parents=True)
    for path in (tmp_path, file):  # a folder of safetensors, and a GGUF file
        assert drafter_directory("eagle3", "", replace(TARGET, path=path)) == tmp_path / "drafters" / "eagle3"
    with pytest.raises(DrafterError, match=r"there is no drafter at .*/drafters/medusa: train one"):
        drafter_directory("medusa", "", replace(TARGET, path=file))


def test_drafters_without_files_are_not_offered(tmp_path: Path) -> None:
    free = (
        "auto",
        "none",
        "prompt-lookup",
        "recycling",
        "lookahead",
        "layer-skip",
        "suffix",
        "ngram",
        "echo",
    )
    assert drafters_with_files(TARGET) == free
    target = replace(TARGET, path=tmp_path)
    assert drafters_with_files(target) == free
    for name in ("eagle", "medusa"):
        (tmp_path / "drafters" / name).mkdir(parents=True)
    assert set(drafters_with_files(target)) - set(free) == {"eagle", "eagle2", "medusa"}
    (tmp_path / "config.json").write_text("{}")  # a checkpoint, which has no MTP modules
    (tmp_path / "drafters" / "rest.store").write_text("")  # a damaged datastore
    assert set(drafters_with_files(target)) - set(free) == {"eagle", "eagle2", "medusa"}


def test_no_drafter_proposes_the_roots_alone() -> None:
    assert build_drafter("none", TARGET).max_nodes == 1


def test_a_model_that_reads_like_a_number_is_still_a_name() -> None:
    with pytest.raises(ModelError, match="no model at '123'"):
        build_drafter("draft-model(model=123)", TARGET)
