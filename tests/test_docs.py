"""What the documentation shows runs, and what it names exists.

Every fenced block of README.md and docs has a tag:

- `python` blocks run.
- `sh`, `console` and untagged blocks hold commands. They run in a folder that has the files of `prepare`.
- `json` blocks are parsed. `text` blocks (output, diagrams) are not checked.

A block that cannot run here has `<!-- not run: the reason -->` before it. Its Python is compiled all the
same, and its `soothsay` commands are parsed: an option that does not exist fails.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from doctest import ELLIPSIS, DocTestFinder, DocTestParser, DocTestRunner
from importlib import import_module
from pathlib import Path

import pytest
from adapters import adapter_of
from places import ROOT
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from soothsay import LLM, REGISTRY, api
from soothsay.cli.app import app
from soothsay.core import verify
from soothsay.core.verify import VERIFIERS
from soothsay.drafters import registry
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.hub import bundled_models

PACKAGE = ROOT / "src" / "soothsay"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "llms.txt", *sorted(DOCS.rglob("*.md"))]
LIVING = [page for page in PAGES if page.parent != DOCS / "log"]
"""Pages that describe the project as it is. The archives of the log describe it as it was."""

COMMANDS = ("", "sh", "console")
OTHER_COMMANDS = (
    "python",
    "make",
    "pip",
    "hf",
    "aiperf",
    "lm_eval",
    "vllm",
    "pytest",
    "ruff",
    "mypy",
    "docker",
    "sudo",
    "export",
    "git",
)
FENCE = re.compile(r"\s*```(\w*)\s*$")
NOT_RUN = re.compile(r"\s*<!-- not run: (\S.*) -->\s*$")
REQUEST = {"model": "sibyl", "prompt": "Once upon a time", "max_tokens": 4}
FILES = ("questions", "prompts", "spec_bench", "answers", "conversations")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    tag: str
    text: str
    not_run: str | None  # the reason

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Split the command lines into arguments, without comments. A backslash continues a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page. A marker counts for the block that comes right after it."""
    not_run: str | None = None
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if fence := FENCE.match(line):
            body = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                body.append(inner)
            yield Block(page, number, fence[1], "\n".join(body), not_run)
            not_run = None
        elif marker := NOT_RUN.match(line):
            not_run = marker[1]
        elif line.strip():
            not_run = None


TUTORIAL = DOCS / "tutorial.md"
"""Its blocks follow each other: tests/test_tutorial.py runs them."""
BLOCKS = [block for page in PAGES for block in blocks_of(page) if page != TUTORIAL or block.not_run]


def of(tags: tuple[str, ...], *, run: bool) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.tag in tags and (block.not_run is None) == run]
    return pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in chosen])


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands read: `path/to/model` is the bundled model, files of questions have two."""
    bundled = open_checkpoint(bundled_models()[0]).path
    answer = {"role": "assistant", "content": "Red. Blue. Green."}
    for name in ("path/to/model", "TARGET"):
        model = tmp_path / name
        (model / "drafters").mkdir(parents=True)
        for source in (*bundled.glob("*"), *bundled.glob("drafters/*")):
            if source.name != "drafters":  # a folder of its own, so that commands can write into it
                (model / source.relative_to(bundled)).symlink_to(source)
    adapter_of(bundled, tmp_path / "path/to/adapter", size=0.3)
    (tmp_path / "DIRECTORY").symlink_to(bundled / "drafters" / "eagle3")
    questions = [
        {"category": "writing", "turns": [asked], "messages": [{"role": "user", "content": asked}, answer]}
        for asked in ("Name three colours.", "Why does it rain?")
    ]
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": REQUEST}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    for name in FILES:
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in questions))
    (tmp_path / "answers.features").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(block: Block) -> None:
    """Run the commands of a block."""
    for program, *arguments in block.commands:
        assert program == "soothsay", f"{program} cannot run here: mark the block as not run, with the reason"
        result = CliRunner().invoke(app, arguments, input="", env={"COLUMNS": "200"}, catch_exceptions=False)
        assert result.exit_code == 0, f"soothsay {shlex.join(arguments)}: {result.output}"


@of(("python",), run=True)
def test_python_runs(block: Block, prepare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    exec(compile(block.text, str(block), "exec"), {"__name__": "example"})


@of(("python",), run=False)
def test_python_that_is_not_run_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@of(COMMANDS, run=True)
def test_commands_run(block: Block, prepare: Path) -> None:
    assert block.commands
    run(block)


@of(COMMANDS, run=False)
def test_commands_that_are_not_run_are_parsed(block: Block, prepare: Path) -> None:
    assert block.commands
    for program, *arguments in block.commands:
        if program == "soothsay":
            parse(arguments)
        else:
            assert program in OTHER_COMMANDS, f"{program!r} is no command; tag output as `text`"


def parse(arguments: list[str]) -> None:
    """Raise for a command or an option that does not exist, a missing argument, a value of a wrong type."""
    command, rest = get_command(app), list(arguments)
    while isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest)


@of(("json",), run=True)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in BLOCKS])
def test_tags_are_known(block: Block) -> None:
    assert block.tag in ("python", "json", "text", *COMMANDS)


LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"[\w./-]*\w\.(?:py|cpp|h|md|html|toml|jinja)|[\w.-]+(?:/[\w.-]+)*/")


def each_of(pages: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def prose_of(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@each_of(sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "training").rglob("*.md"), *PACKAGE.rglob("*.md")}))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in LINK.findall(prose_of(page)):
        if "://" not in target:
            file, _, heading = target.partition("#")
            place = page.parent / file if file else page
            assert place.exists(), f"{page.name} links to {target}"
            assert not heading or heading in headings(place), f"{page.name} links to {target}"


@each_of(LIVING)
def test_paths_that_pages_name_exist(page: Path) -> None:
    """Names of files and folders in code spans exist.

    A name is relative to the repository, to `src/soothsay`, to the page, or to a folder that the page names.
    """
    prose = prose_of(page)
    named = [name for name in CODE.findall(prose) if SOURCE.fullmatch(name)]
    bases = [ROOT, PACKAGE, page.parent]
    bases += [base / name for base in bases for name in named if name.endswith("/")]
    for name in named:
        assert any((base / name).exists() for base in bases), (
            f"{page.name} names {name}, which does not exist"
        )


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def file_tree(page: Path) -> set[Path]:
    """The paths in a page's tree of files. A folder ends with a slash, and indents what is in it."""
    tree = page.read_text().partition("```text\nsrc/soothsay/\n")[2].partition("```")[0]
    paths, folders = set(), [(-1, ROOT), (0, PACKAGE)]
    for line in tree.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        while folders[-1][0] >= depth:
            folders.pop()
        paths.add(path := folders[-1][1] / name)
        if name.endswith("/"):
            folders.append((depth, path))
    return paths


def test_architecture_names_every_package_and_top_level_module() -> None:
    named = file_tree(DOCS / "architecture.md")
    packages = {file.parent for file in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    existing = packages | set(PACKAGE.glob("[!_]*.py")) | {ROOT / "csrc", ROOT / "tests"}
    assert named == existing | {PACKAGE / "bundled"}


def test_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    for page in DOCS.iterdir():
        if page.suffix in (".md", ".html") and page.name != "README.md":
            assert f"]({page.name})" in index, f"docs/README.md does not name {page.name}"


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(name.rpartition(".")[2] for name in shown) == sorted(api.__all__)
    for name in shown:
        module, _, own = name.rpartition(".")
        assert getattr(import_module(module), own) is getattr(api, own)


@pytest.fixture(scope="module")
def granted() -> dict[str, object]:
    """What examples take for granted: the public names, and a model as `llm`."""
    return {name: getattr(api, name) for name in api.__all__} | {"llm": LLM("sibyl")}


@pytest.mark.parametrize("name", api.__all__)
def test_every_public_name_has_an_example(name: str, granted: dict[str, object]) -> None:
    """Its docstring has one, which runs, as those of its members do."""
    value = getattr(api, name)
    if isinstance(value, dict):  # its docstring is the text below it, which only the source has
        module = registry if value is REGISTRY else verify
        text = inspect.getsource(module).partition(f"\n{name}: ")[2].split('"""')[1]
        tests = [DocTestParser().get_doctest(text, granted, name, None, None)]
    else:
        tests = DocTestFinder().find(value, name, module=False, globs=granted)
    assert [test.name for test in tests if test.name == name and test.examples], f"{name} has no example"
    for test in tests:
        told: list[str] = []
        assert not DocTestRunner(optionflags=ELLIPSIS).run(test, out=told.append).failed, "".join(told)


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f" {page.relative_to(DOCS)}\n" in site, f"mkdocs.yml lacks {page}"


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The first table below a heading: its other cells by the names in code spans of its first."""
    table = page.read_text().partition(f"# {heading}\n")[2].partition("\n#")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {name: rest for first, *rest in cells for name in CODE.findall(first)}


def test_every_drafter_is_described_with_its_options() -> None:
    described = rows(DOCS / "drafters.md", "Drafters")
    assert described.keys() == REGISTRY.keys()
    for name, cells in described.items():
        options = {option for option in inspect.signature(REGISTRY[name]).parameters if option != "target"}
        assert set(CODE.findall(cells[-1])) == options, f"options of {name}"


def test_every_verifier_is_described() -> None:
    assert rows(DOCS / "guarantee.md", "Verifiers").keys() == VERIFIERS.keys()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
