"""The pictures of the README and the docs: what scripts draw is XML with all that was given to them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def script(name: str) -> ModuleType:
    """A script beside the pictures, as a module."""
    spec = importlib.util.spec_from_file_location(f"pictures_{name}", PICTURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def texts(picture: str) -> list[ElementTree.Element]:
    """All texts of a picture."""
    return [element for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")]


def test_every_token_appears_on_both_sides_when_it_came() -> None:
    race = script("race")
    words = ("def", " f(x)", ":\n", "    return", " x & y" * 20, "\n")
    plain = [race.Shown(word, n + 1.0, False) for n, word in enumerate(words)]
    auto = [race.Shown(word, (n + 1) / 2, n % 2 == 1) for n, word in enumerate(words)]
    shown = texts(race.draw(plain, auto))
    whole = plain[-1].seconds + race.PAUSE
    for tokens in (plain, auto):
        for _, _, text, token in race.places(tokens):
            if text.strip():
                time = f"0;{token.seconds / whole:.4f}"
                kind = "drafted" if token.was_drafted else "own"
                assert any(
                    own.text == text.strip() and own.get("class") == kind and own[0].get("keyTimes") == time
                    for own in shown
                ), token
    assert {own.text for own in shown} >= {"1 tokens a second", "2 tokens a second"}


def test_no_line_is_longer_than_its_side() -> None:
    race = script("race")
    tokens = [race.Shown("long " * 40, 1.0, False), race.Shown("x" * 200, 2.0, True)]
    pieces = race.places(tokens)
    assert "".join(text for _, _, text, _ in pieces) == "long " * 40 + "x" * 200
    assert all(column + len(text) <= race.COLUMNS for _, column, text, _ in pieces)


def test_bars_are_as_long_as_their_numbers() -> None:
    picture = script("bars").draw("Tokens & seconds", [("plain", 10.0), ("auto", 25.0)])
    lengths = [
        float(element.get("width", ""))
        for element in ElementTree.fromstring(picture).iter()
        if element.tag.endswith("rect") and element.get("class")
    ]
    assert lengths[1] / lengths[0] == 2.5
    assert [own.text for own in texts(picture)] == ["Tokens & seconds", "plain", "10", "auto", "25"]


def test_all_pictures_are_shown_and_drawn() -> None:
    pages = PICTURES.parent.parent / "README.md", *PICTURES.parent.glob("*.md")
    shown = "".join(page.read_text() for page in pages)
    for path in PICTURES.glob("*.svg"):
        assert f"pictures/{path.name})" in shown
        assert len(ElementTree.fromstring(path.read_text())), path
