"""Options from a file and from environment variables, and the page that lists all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT
from settings_page import page
from typer.main import get_command
from typer.testing import CliRunner, Result

from soothsay.cli.app import app


def run(settings: str, *arguments: str, folder: Path, **variables: str) -> Result:
    """Run a command with a file of settings."""
    file = folder / "soothsay.toml"
    file.write_text(settings)
    environment = {"COLUMNS": "200", **variables}
    return CliRunner().invoke(app, ["--config", str(file), *arguments], input="", env=environment)


GENERATE = """
[generate]
model = "sibyl"
max-tokens = 6
temperature = 0
drafter = "none"
stats = true
"""
ASKED = "generate", "A man in a blue shirt is"


def test_the_command_line_goes_before_variables_and_variables_before_the_file(tmp_path: Path) -> None:
    variable = {"SOOTHSAY_GENERATE_MAX_TOKENS": "4"}
    assert "6 tokens" in run(GENERATE, *ASKED, folder=tmp_path).stderr
    assert "4 tokens" in run(GENERATE, *ASKED, folder=tmp_path, **variable).stderr
    assert "3 tokens" in run(GENERATE, *ASKED, "-n", "3", folder=tmp_path, **variable).stderr


def test_arguments_lists_and_underscores_are_read(tmp_path: Path) -> None:
    """The model of `verify` is an argument, and its drafter can be repeated."""
    settings = """
[verify]
model = "sibyl"
drafter = ["suffix", "ngram"]
max_tokens = 4
limit = 1
"""
    result = run(settings, "verify", folder=tmp_path)
    assert result.exit_code == 0, result.output
    assert "suffix" in result.output
    assert "ngram" in result.output
    assert "mtp" not in result.output
    one = settings.replace('["suffix", "ngram"]', '"suffix"')
    assert "suffix" in run(one, "verify", folder=tmp_path).stdout


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("[generat]\nmodel = 1", "there is no command generat. Did you mean generate?"),
        ("[generate]\nmax-token = 1", "there is no option generate.max-token. Did you mean max-tokens?"),
        ("[bench.spek]\nrounds = 1", "there is no command bench.spek. Did you mean spec?"),
        ("[bench]\nspec = 1", "bench.spec must be a table of options, such as [bench.spec]"),
        ("generate = 1", "generate must be a table"),
        ("port = 80", "soothsay.toml: port is an option: put it below [serve]"),
        ("allow_drafter = ['none']", "allow_drafter is an option: put it below [serve]"),
        (
            "per-task = 1",
            "per-task is an option: put it below [bench.peers] or [bench.equality] or [bench.spec]",
        ),
        ("[bench]\nper-task = 1", "bench.per-task is an option: put it below [bench.peers] or"),
        ("[generate]\nmax-tokens = 'x'", "'--max-tokens'"),
        ("[generate]\nmax-tokens = [1]", "generate.max-tokens must be a text or a number"),
        ("[generate]\nmax-tokens = {a = 1}", "generate.max-tokens must be a text or a number"),
        ("[generate]\nstop = [['a']]", "generate.stop must be a text or a number, or a list of them"),
        ("[generate]\nstop = {a = 1}", "generate.stop must be a text or a number, or a list of them"),
        ("[generate]\nmax_tokens = 1\nmax-tokens = 2", "generate.max-tokens is there twice"),
        ("[generate]\nmax-tokens = true", " integer (from the file of --config)"),
        ("[generate]\nmax-tokens = 1.5", "'--max-tokens'"),
        ("[generate]\ntemperature = true", "'--temperature'"),
        ("[generate", "is not TOML"),
        ("\u0000", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("#" * (1 << 20) + "#", "bytes"),
    ],
)
def test_faults_are_named(tmp_path: Path, settings: str, problem: str) -> None:
    result = run(settings, *ASKED, folder=tmp_path)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_a_fault_in_a_variable_names_the_variable(tmp_path: Path) -> None:
    result = run(GENERATE, *ASKED, folder=tmp_path, SOOTHSAY_GENERATE_MAX_TOKENS="many")
    assert "'--max-tokens'" in result.stderr
    assert "from the variable SOOTHSAY_GENERATE_MAX_TOKENS" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SOOTHSAY_GENERATE_MAXTOKENS", "SOOTHSAY_GENERATE_MAX_TOKENS"),
        ("SOOTHSAY_BENCH_SPEC_ROUND", "SOOTHSAY_BENCH_SPEC_ROUNDS"),
        ("SOOTHSAY_MAX_TOKENS", "SOOTHSAY_GENERATE_MAX_TOKENS"),
        *((name, None) for name in ("SOOTHSAY_KERNELS", "SOOTHSAY_MODELS", "SOOTHSAY_GENERATE_TOP_K")),
        *((name, None) for name in ("SOOTHSAY_SERVICE_PORT", "SOOTHSAY_PORT_8000_TCP", "SOOTHSAY_TEST_RAY")),
    ],
)
def test_a_misspelt_variable_is_told(tmp_path: Path, variable: str, meant: str | None) -> None:
    result = run(GENERATE.replace("stats = true", ""), *ASKED, folder=tmp_path, **{variable: "1"})
    told = f"the variable {variable} is no option's, and is ignored. Did you mean {meant}?"
    assert (result.exit_code, result.stderr) == (0, f"Warning: {told}\n" if meant else "")


@pytest.mark.parametrize("command", [["serve", "sibyl"], ["bench", "spec"]])
def test_what_goes_before_the_command_is_told(command: list[str]) -> None:
    result = CliRunner().invoke(
        app, [*command, "--config", "x.toml"], env={"COLUMNS": "200"}, prog_name="soothsay"
    )
    assert result.exit_code == 2
    assert "No such option: --config. It goes before the command: soothsay --config ..." in result.stderr


def test_the_page_of_settings_is_that_of_the_commands() -> None:
    """If this fails, run `python tests/helpers/settings_page.py > docs/settings.md`."""
    assert (ROOT / "docs" / "settings.md").read_text() == page()


def test_no_two_commands_share_a_variable() -> None:
    names = [f"{command} {option.name}" for command, option in _options(get_command(app), "")]
    assert len({name.upper().replace("-", "_").replace(" ", "_") for name in names}) == len(names)


def _options(command: object, name: str) -> list[tuple[str, object]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(name, option) for option in command.params]  # type: ignore[attr-defined]
    return [one for own, group in inner.items() for one in _options(group, f"{name} {own}")]
