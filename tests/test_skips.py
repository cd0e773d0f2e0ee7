"""The plugin of `skips.py`: which skips it lists, and which make a strict run fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import skips

from soothsay.model.native.native_kernels import NativeKernels

pytest_plugins = ["pytester"]

KNOWN = "no amx kernels: this processor lacks amx"
UNKNOWN = "not today"


@pytest.fixture
def runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Runs of pytest in a folder of their own, as on a machine where nobody has set CI."""
    monkeypatch.delenv("CI", raising=False)
    folder = str(Path(skips.__file__).parent)
    pytester.makeconftest(f"import sys\n\nsys.path.insert(0, {folder!r})\npytest_plugins = ['skips']\n")
    return pytester


def run(runs: pytest.Pytester, *options: str) -> pytest.RunResult:
    return runs.runpytest_inprocess("-p", "no:cacheprovider", *options)


def write(runs: pytest.Pytester, *reasons: str) -> None:
    """A file of one test that passes, and of one more for each reason, which is skipped."""
    tests = [f"def test_{i}():\n    pytest.skip({reason!r})\n" for i, reason in enumerate(reasons)]
    runs.makepyfile("import pytest\n\ndef test_it():\n    pass\n\n" + "\n".join(tests))


@pytest.mark.parametrize(
    ("reasons", "options", "code"),
    [
        ([KNOWN, KNOWN], ["--strict-skips"], 0),
        ([KNOWN, UNKNOWN], ["--strict-skips"], 1),
        ([KNOWN, UNKNOWN], [], 0),
        ([KNOWN, KNOWN], ["--strict-skips", "-n", "2"], 0),
        ([KNOWN, UNKNOWN], ["--strict-skips", "-n", "2"], 1),
    ],
)
def test_a_strict_run_fails_on_other_reasons(
    runs: pytest.Pytester, reasons: list[str], options: list[str], code: int
) -> None:
    write(runs, *reasons)
    result = run(runs, *options)
    assert result.ret == code
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines([f"*{reasons.count(KNOWN)}  {KNOWN}"])
    told = result.stdout.str()
    assert ("NOT EXPECTED" in told) is (UNKNOWN in reasons)
    assert ("fail this run" in told) is (code == 1)


@pytest.mark.parametrize(("value", "code"), [("true", 1), ("1", 1), ("false", 0), ("0", 0), ("", 0)])
def test_ci_makes_a_run_strict(
    runs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: str, code: int
) -> None:
    monkeypatch.setenv("CI", value)
    write(runs, UNKNOWN)
    assert run(runs).ret == code


WAYS = {
    "import": "pytest.importorskip('a_module_that_is_not_there')",
    "file": "pytest.skip('not today: file', allow_module_level=True)",
    "mark": "pytestmark = pytest.mark.skip\n\ndef test_it():\n    pass",
    "condition": "@pytest.mark.skipif(True, reason='not today: condition')\ndef test_it():\n    pass",
    "part": "@pytest.fixture\ndef p():\n    pytest.skip('not today: part')\n\ndef test_it(p):\n    pass",
}
TOLD = {
    "import": "could not import 'a_module_that_is_not_there': *",
    "file": "not today: file",
    "mark": "unconditional skip",
    "condition": "not today: condition",
    "part": "not today: part",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_skip_fails_a_strict_run(runs: pytest.Pytester, way: str) -> None:
    write(runs)
    runs.makepyfile(test_other=f"import pytest\n\n{WAYS[way]}\n")
    result = run(runs, "--strict-skips")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["NOT EXPECTED*", f"     1  {TOLD[way]}"])


def test_every_way_to_skip_is_listed_once_by_several_workers(runs: pytest.Pytester) -> None:
    write(runs)
    runs.makepyfile(**{f"test_{way}": f"import pytest\n\n{body}\n" for way, body in WAYS.items()})
    result = run(runs, "--strict-skips", "-n", "2")
    assert result.ret == 1
    for told in TOLD.values():
        result.stdout.fnmatch_lines([f"     1  {told}"])


def test_other_failures_keep_their_exit_status(runs: pytest.Pytester) -> None:
    runs.makepyfile("import pytest\n\ndef test_0():\n    pytest.skip('not today')\n\nraise ValueError\n")
    assert run(runs, "--strict-skips").ret == pytest.ExitCode.INTERRUPTED


def test_a_run_without_skips_lists_none(runs: pytest.Pytester) -> None:
    write(runs)
    result = run(runs, "--strict-skips")
    assert result.ret == 0
    assert "by reason" not in result.stdout.str()


def test_expected_failures_are_no_skips(runs: pytest.Pytester) -> None:
    runs.makepyfile(
        "import pytest\n\n@pytest.mark.xfail(strict=True)\ndef test_it():\n    raise ValueError\n"
    )
    assert run(runs, "--strict-skips").ret == 0


@pytest.mark.parametrize(
    ("reason", "compiler", "x86", "expected"),
    [
        ("no amx kernels: this processor lacks amx", True, True, True),
        ("no amx kernels: the native kernels for amx are not compiled", True, True, False),
        ("no amx kernels: the native kernels for amx are not compiled", True, False, True),
        ("no amx kernels: the native kernels for amx are not compiled", False, True, True),
        ("no portable kernels: the native kernels for portable are not compiled", True, False, False),
        ("no portable kernels: the native kernels for portable are not compiled", False, False, True),
        ("no native kernels: they are not compiled", True, True, False),
        ("no native kernels: they are not compiled", False, True, True),
        ("could not import 'compressed_tensors': No module named 'compressed_tensors'", True, True, False),
        ("it crashed, so there is no browser: none", True, True, False),
        ("playwright is not installed", True, True, False),
        ("", True, True, False),
    ],
)
def test_what_is_expected_depends_on_the_machine(
    reason: str, compiler: bool, x86: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "python" if compiler else "a-compiler-that-is-not-there"
    monkeypatch.setenv("CC", f"{command} -pthread")
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr("platform.machine", lambda: "x86_64" if x86 else "aarch64")
    assert (skips.explain(reason) is not None) is expected


def test_a_processor_that_lacks_an_instruction_set_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(soothsay_runs_here=lambda: 0)
    monkeypatch.setattr("soothsay.model.native.library.ctypes.CDLL", lambda path: library)
    with pytest.raises(OSError) as error:
        NativeKernels("portable")
    assert skips.explain(f"no portable kernels: {error.value}") == "this processor lacks an instruction set"


def test_a_browser_that_is_installed_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert skips.explain("no browser: none of chromium, google-chrome is installed") is not None
    (tmp_path / "chromium").touch(mode=0o755)
    assert skips.explain("no browser: none of chromium, google-chrome is installed") is None


@pytest.mark.parametrize("there", [True, False])
def test_shared_data_that_are_there_are_no_reason(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "shared").mkdir()
    monkeypatch.setattr(skips, "ROOT", tmp_path / "soothsay")
    assert (skips.explain("no shared data: ../shared is not there") is None) is there
