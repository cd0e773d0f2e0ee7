"""Imports run in one direction: see docs/architecture.md."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

LAYERS = (
    (
        *(
            "errors",
            "handshake",
            "openmp",
            "own_process",
            "own_files",
            "processors",
            "progress",
            "machine",
            "mapped_memory",
            "files",
        ),
        *("config", "corpus", "plotting"),
        *(
            "tokenizer",
            "chat_layout",
            "chat_template",
            "template_operations",
            "template_meter",
            "vocabulary",
        ),
    ),
    ("core",),
    ("model",),
    ("drafters",),
    ("engine",),
    ("options", "request_builder", "result", "llm", "api"),
    ("quantizing",),
    ("server",),
    ("train",),
    ("bench",),
    ("cli", "__main__"),
)
"""Names below `soothsay`, the lowest layer first. Within a layer there may be imports, but no cycle."""

STRANGERS = {("bench", "server"), ("bench", "train"), ("train", "server")}
"""Pairs of layers that are side by side: the first must not import the second, although it is above."""

WINGS = (
    ("ops", "base", "places", "learned_files"),
    ("trees",),
    ("lookup", "heads", "models"),
    ("control", "learning"),
    ("registry",),
)
"""Layers below `soothsay.drafters`, the lowest first. Names of one wing must not import each other."""

PARTS = ("specs", "ops", "decoder", "transformer")
"""Layers below `soothsay.model`, the lowest first. Other rooms stand beside them."""

ROOMS = (
    ("server_config",),
    ("http",),
    ("access", "engines", "tools"),
    ("fleet",),
    ("generation",),
    ("apis",),
    ("http_server",),
    ("runner", "placement", "cluster", "batch"),
)
"""Layers below `soothsay.server`, the lowest first. No API imports another, and of the three rooms that stand
side by side above `http`, none imports another."""

APART = {"access", "engines", "tools"}


def read(src: Path = SRC) -> dict[str, str]:
    """Source text by module name."""
    modules = {}
    for file in sorted(src.rglob("*.py")):
        *package, name = file.relative_to(src).with_suffix("").parts
        modules[".".join(package if name == "__init__" else [*package, name])] = file.read_text("utf-8")
    return modules


@cache
def import_statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, anywhere in it. Cached: each test looks at all modules twice."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(name: str, text: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Modules that a module imports, anywhere in it, and the packages that are loaded for them."""
    for node in import_statements(text):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            base = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{module}.{alias.name}" for alias in node.names]
            found = [one if one in modules else module for one in found]
        for one in found:
            while one in modules and one != "soothsay":  # `soothsay` itself loads its names lazily
                if one != name and not name.startswith(f"{one}."):
                    yield one
                one = one.rpartition(".")[0]


def level(layers: tuple[tuple[str, ...], ...], name: str) -> int:
    return next(i for i, layer in enumerate(layers) if name in layer)


def is_upward(name: str, other: str) -> bool:
    """Whether `name` must not import `other`."""
    _, mine, *below = name.split(".")
    _, its, *its_below = other.split(".")
    if mine != its:
        return level(LAYERS, mine) < level(LAYERS, its) or (mine, its) in STRANGERS
    if mine == "drafters" and below and its_below and below[0] != its_below[0]:
        own, others = level(WINGS, below[0]), level(WINGS, its_below[0])
        return own < others or (own == others and own > 0)
    if mine == "model" and below and its_below and {below[0], its_below[0]} <= {*PARTS}:
        return PARTS.index(below[0]) < PARTS.index(its_below[0])
    if mine == "server" and below and its_below:
        return is_upward_in_server(below, its_below)
    return False


def is_upward_in_server(name: list[str], other: list[str]) -> bool:
    """Whether a module of the server must not import another. Both are given below `soothsay.server`."""
    if name[0] == other[0]:
        return name[0] == "apis" and len(name) > 1 and len(other) > 1 and name[1] != other[1]
    own, others = level(ROOMS, name[0]), level(ROOMS, other[0])
    return own < others or (own == others and name[0] in APART)


def defects(modules: Mapping[str, str]) -> list[str]:
    """Upward imports, and the first cycle."""
    graph = {name: set(imports(name, text, modules)) for name, text in modules.items() if name != "soothsay"}
    found = [
        f"{name} imports {other}, which stands above or beside it"
        for name, others in graph.items()
        for other in sorted(others)
        if is_upward(name, other)
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"cycle: {' <- '.join(error.args[1])}")
    return found


def test_imports_run_in_one_direction() -> None:
    assert defects(read()) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("soothsay.core.tree", "from soothsay.drafters.base import Drafter"),
        ("soothsay.core.tree", "from soothsay.model.transformer import Transformer"),
        ("soothsay.model.weights.load", "from soothsay.engine.engine import Engine"),
        ("soothsay.engine.engine", "from soothsay.llm import LLM"),
        (
            "soothsay.drafters.trees.templates",
            "from soothsay.drafters.heads import loading",
        ),
        (
            "soothsay.drafters.lookup.suffix_matching",
            "from soothsay.drafters.heads import loading",
        ),
        ("soothsay.train.trainer", "from soothsay.bench.measure import median"),
        ("soothsay.bench.measure", "from soothsay.train.trainer import train"),
        ("soothsay.bench.measure", "from soothsay.server.http_server import make_app"),
        ("soothsay.server.http_server", "import soothsay.cli"),
        ("soothsay.server.http.json_streams", "from soothsay.server.fleet.jobs import Job"),
        ("soothsay.server.tools.reasoning", "from soothsay.server.engines.worker import Worker"),
        ("soothsay.server.generation.service", "from soothsay.server.apis.openai import openai_routes"),
        (
            "soothsay.server.apis.ollama.ollama_routes",
            "from soothsay.server.apis.llamacpp.llama_routes import llama_routes",
        ),
        ("soothsay.core.tree", "from soothsay.core.batch import Batch"),
        (
            "soothsay.config",
            "import soothsay.corpus",
        ),
    ],
)
@pytest.mark.parametrize("where", ["top", "type checking", "function"])
def test_one_import_in_the_wrong_direction_is_found(name: str, line: str, where: str) -> None:
    modules = read()
    indented = line.replace("\n", "\n    ")
    added = {
        "top": line,
        "type checking": f"if TYPE_CHECKING:\n    {indented}",
        "function": f"def late():\n    {indented}",
    }[where]
    before = defects(modules)
    modules[name] += f"\n{added}\n"
    if name == "soothsay.config":
        modules["soothsay.corpus"] += "\nimport soothsay.config\n"
    assert len(defects(modules)) > len(before)


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports two files of one name as one module, and fails in one of them."""
    files = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in files.items() if count > 1] == []
