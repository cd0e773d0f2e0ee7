"""One set of kernels can be forced, and a name that cannot be had is an early error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from kernels import FASTEST
from tiny import adapted
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from soothsay import LLM, ModelError
from soothsay.cli.app import app
from soothsay.drafters.models.draft_model import draft_model
from soothsay.model.kernel_sets import chosen_kernels
from soothsay.model.native import library
from soothsay.model.native.library import VARIANTS, check_kernels
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config

HERE = [name for name in VARIANTS if not library._problem(name)]
native = pytest.mark.skipif(not HERE, reason="the kernels are not compiled")


@pytest.mark.parametrize("name", ["avx3", "../native/_avx2", "", "AVX2"])
def test_an_unknown_name_gets_those_that_are_here(name: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_kernels(name)
    assert str(raised.value) == (
        f"there are no kernels {name!r}; on this machine there are {', '.join(['auto', 'stock', *HERE])}"
    )


@pytest.mark.parametrize("problem", ["the native kernels for X are not compiled", "this processor lacks X"])
def test_a_set_that_does_not_run_here_is_refused(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = VARIANTS[0]

    def opened(variant: str) -> None:
        if variant == lacking:
            raise OSError(problem.replace("X", variant))

    monkeypatch.setattr(library, "_opened", opened)
    others = ", ".join(["auto", "stock", *VARIANTS[1:]])
    with pytest.raises(ModelError) as raised:
        check_kernels(lacking)
    assert str(raised.value) == f"{problem.replace('X', lacking)}; on this machine there are {others}"


def test_the_name_is_checked_before_a_model_is_looked_for() -> None:
    with pytest.raises(ModelError, match="there are no kernels 'avx3'"):
        LLM("nobody/has-this-model", kernels="avx3")


@native
@pytest.mark.parametrize("name", ["stock", *VARIANTS])
def test_a_model_and_its_draft_model_run_on_the_set(name: str) -> None:
    if problem := library._problem(name):
        pytest.skip(f"no {name} kernels: {problem}")
    llm = LLM("sibyl", kernels=name, drafter="none", kv_tokens=512, max_requests=1)
    assert llm.model.kernels.variant == ("" if name == "stock" else name)
    assert llm.model.kernels.name in llm.numeric_mode
    if name != "stock":
        drafter: Any = draft_model(llm.engine.target, "sibyl")
        assert drafter.model.kernels.variant == name


@native
def test_what_a_set_cannot_compute() -> None:
    spec, name = read_model_config(open_checkpoint("sibyl")), HERE[-1]
    with pytest.raises(ModelError, match=f"'{name}' run on CPUs, not on cuda"):
        chosen_kernels(name, spec, "cuda")
    with pytest.raises(ModelError, match=f"'{name}' lack a part of this model"):
        chosen_kernels(name, adapted(spec, head_dim=24))
    assert isinstance(chosen_kernels("stock", spec), StockKernels)
    assert chosen_kernels("auto", spec).name == FASTEST.name


def commands(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
    if isinstance(command, TyperGroup):
        for own, inner in command.commands.items():
            yield from commands(f"{name} {own}".strip(), inner)
    else:
        yield name, {option for one in command.params for option in one.opts}


def test_every_command_that_loads_a_model_has_the_option() -> None:
    options: Mapping[str, set[str]] = dict(commands("", get_command(app)))
    have = {name for name, own in options.items() if "--kernels" in own}
    assert have >= {name for name, own in options.items() if "--dtype" in own} - {"quantize"}
    assert have >= {"bench host", "bench length", "bench learn", "bench stack", "bench experts"}


def test_a_command_refuses_a_name_before_it_imports_torch() -> None:
    code = """
import sys
from soothsay.cli.app import app
try:
    app(["serve", "sibyl", "--kernels", "avx3"])
except SystemExit as end:
    assert end.code == 2, end.code
assert "torch" not in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "there are no kernels 'avx3'; on this machine there are auto, stock" in said


@native
def test_the_portable_engines_of_a_server_have_one_set() -> None:
    for other in {*HERE, "stock"} - {"portable"}:
        result = CliRunner().invoke(app, ["serve", "sibyl", "--portable", "--kernels", other, "--port", "0"])
        assert result.exit_code == 2
        assert f"leave out --kernels {other}" in " ".join(result.output.split())
