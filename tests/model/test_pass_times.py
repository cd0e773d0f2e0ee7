"""The times of passes: interpolation, measurements on disk, and following the passes that run."""

from __future__ import annotations

import errno
import json
import os
import pwd
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import mixtures

from soothsay.errors import ModelError
from soothsay.files import user_path
from soothsay.machine import processor_seconds_of_others
from soothsay.model.timing import known_times, pass_times
from soothsay.model.timing import pass_measuring as timing
from soothsay.model.timing.known_times import KnownTimes
from soothsay.model.timing.pass_measuring import (
    BRIEF_ROWS,
    CONTEXTS,
    COUNTED,
    ROWS,
    SETTLING,
    VerifyPass,
    measure_passes,
)
from soothsay.model.timing.pass_predicting import predicted_times
from soothsay.model.timing.pass_times import KEPT_MEASUREMENTS, Measurements, PassTimes, parse_measurements
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint

Make = Callable[..., Transformer]


def test_times_are_interpolated_between_and_beyond_the_measured_points() -> None:
    times = PassTimes([1, 4, 8], [100, 200], [[1.0, 4.0, 4.0], [2.0, 8.0, 8.0]])
    assert times(2, 100) == pytest.approx(2.0)
    assert times(2, 150) == pytest.approx(3.0)
    assert times(16, 100) == pytest.approx(4.0)
    assert times(4, 0) == pytest.approx(1e-9)  # never nothing, whatever the line says
    assert times.span(1, 3, 100) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert PassTimes([1, 2, 4], [0], [[1.0, 2.0, 4.0]])(12) == pytest.approx(12.0)


def test_each_request_of_a_batch_reads_a_context_of_its_own() -> None:
    """A longer context adds 2 s to a row, 3 to two rows of one request, and 6 to four."""
    times = PassTimes([1, 2, 4, 8], [0, 100], [[10.0, 11.0, 13.0, 17.0], [12.0, 14.0, 19.0, 29.0]])
    assert times(4, 100) == times(4, 100, 1) == 19
    assert times(4, 100, 4) == 13 + 4 * 2  # a row each
    assert times(4, 50, 4) == 13 + 4 * 1
    assert times(4, 100, 2) == 13 + 2 * 3  # two rows each
    assert times(4, 0, 4) == 13
    assert times.span(4, 1, 100, 4) == pytest.approx([21, 23.0])
    times.follow(4, 100, 42.0, requests=4)  # the machine is half as fast
    assert times(1, 0) == pytest.approx(20)


def test_more_rows_never_seem_to_cost_less() -> None:
    times = PassTimes([1, 2, 4], [0], [[3.0, 1.0, 5.0]])
    assert times.span(1, 3, 0) == pytest.approx([1.0, 1.0, 3.0, 5.0]), "a delay, or the first pass"


def test_more_rows_never_seem_to_cost_less_once_times_have_followed_passes() -> None:
    times = PassTimes([1, 2, 4], [0], [[3.0, 3.1, 5.0]])
    times.follow(4, 0, 5.0)
    for _ in range(50):
        times.follow(1, 0, 4.0)
    one, two, *_ = times.span(1, 3, 0)
    assert one == pytest.approx(4.0, rel=0.05)
    assert one <= two


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other processes have used at each question: nothing, unless a test says otherwise."""
    used = list[float]()
    monkeypatch.setattr(known_times, "processor_seconds_of_others", lambda: used.pop(0) if used else 0.0)
    return used


@pytest.fixture(autouse=True)
def _all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as many passes as users do. Other tests measure fewer."""
    usual = {"ROWS": ROWS, "BRIEF_ROWS": BRIEF_ROWS, "CONTEXTS": CONTEXTS}
    for name, value in {**usual, "SETTLING": SETTLING, "COUNTED": COUNTED}.items():
        monkeypatch.setattr(timing, name, value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "soothsay" / "step-times"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements take no time."""
    times = PassTimes([*BRIEF_ROWS], [64], [[1e-3 * rows for rows in BRIEF_ROWS]])
    monkeypatch.setattr(known_times, "measure_briefly", lambda *_: times)


def loaded(model: Transformer, context: int = 512) -> PassTimes:
    """The times that a start of the engine finds or measures."""
    return KnownTimes(model, context)(may_measure=True)


def idle(model: Transformer, context: int = 512) -> PassTimes:
    """The times after a start and as much idle time as the engine uses."""
    known = KnownTimes(model, context)
    known(may_measure=True)
    while known.study():
        pass
    return known()


def on_disk(cache: Path) -> dict[str, Any]:
    (file,) = cache.glob("*.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_a_request_never_waits_for_a_measurement(
    tiny: Make, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifyPass, "__call__", None)
    known = KnownTimes(tiny(), 512)
    assert not known.study(), "nobody asks for times"
    assert known()(8) > known()(1) > 0
    assert not cache.exists()


def test_rows_are_predicted_to_be_free_until_arithmetic_takes_longer_than_reading(tiny: Make) -> None:
    times = predicted_times(tiny(), 512)
    assert times(2) < 1.5 * times(1)
    assert times(64) > 1.8 * times(32)
    assert times(1, 512) > times(1, 0)


def test_loading_measures_a_few_rows_and_idle_time_all(tiny: Make, cache: Path) -> None:
    model = tiny()
    assert loaded(model).rows == [*BRIEF_ROWS]
    assert on_disk(cache)["rows"] == [*BRIEF_ROWS]
    everything = idle(model)
    assert everything.rows == on_disk(cache)["rows"] == [*ROWS]
    assert loaded(model).seconds == everything.seconds


def test_what_was_measured_is_remembered_by_model(tiny: Make, cache: Path) -> None:
    first = loaded(tiny())
    (measured,) = on_disk(cache)["measured"]
    assert measured == [pytest.approx(times) for times in first.seconds]
    loaded(tiny(num_layers=1, windows=(None,)))
    assert len(list(cache.glob("*.json"))) == 2


def test_measured_passes_count_the_experts_that_they_run(tiny: Make, cache: Path) -> None:
    first = measure_passes(model := tiny(experts=mixtures(16, 2, 32, layers=(0, 1))), 512)
    assert first.experts is not None
    assert first.experts.experts[0] == 2
    assert 4 < first.experts.experts[3] <= first.experts.experts[-1] <= 16
    known = loaded(model)
    (kept,) = parse_measurements(on_disk(cache))
    assert known.experts is not None
    assert kept.experts is not None
    assert kept.experts.experts == known.experts.experts


def test_rows_that_share_experts_count_as_fewer_rows() -> None:
    rows, experts = [1, 2, 4, 8, 16], [4.0, 7.0, 14.0, 24.0, 30.0]
    times = PassTimes(rows, [0], [[1.0, 2.0, 4.0, 8.0, 16.0]], experts)
    assert times.experts is not None
    for _ in range(200):
        times.follow(7, 0, 4.0, experts=14.0)  # as 4 rows of unrelated tokens
    assert times.experts.each == pytest.approx(0.5)
    assert times(7) == pytest.approx(4.0, rel=1e-3)
    for _ in range(200):
        times.follow(16, 0, 8.5, experts=30.0)  # nearly all experts whatever the tokens are
    assert times.experts.each == pytest.approx(0.5)


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_a_busy_or_a_lucky_moment_is_outvoted(factor: float) -> None:
    curve = [1.0, 1.5, 2.0, 4.0]
    usual = PassTimes([1, 2, 4, 8], [0], [curve])
    odd = PassTimes([1, 2, 4, 8], [0], [[1.0 * min(factor, 1), 1.5, 2.0 * max(factor, 1), 4.0]])
    fast = PassTimes([1, 2, 4, 8], [0], [[seconds / 2 for seconds in curve]])
    for order in ([usual, odd, fast], [odd, usual, fast], [usual, usual, odd, usual, fast]):
        assert PassTimes.agreed(order).seconds[0][:2] == pytest.approx(fast.seconds[0][:2], rel=0.05)
        assert PassTimes.agreed(order).seconds[0][3] == pytest.approx(fast.seconds[0][3], rel=0.05)


def test_the_first_passes_after_loading_do_not_count(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[VerifyPass]()

    def seconds(run: VerifyPass, device: torch.device) -> float:
        run()
        return (0.057 if len(runs) <= 6 else 0.039) * len(run.rows.tree)

    monkeypatch.setattr(VerifyPass, "__call__", lambda run: runs.append(run))
    monkeypatch.setattr(timing, "_seconds_of", seconds)
    assert measure_passes(tiny(), 512, repeats=1)(1) == pytest.approx(0.039)


def test_the_first_starts_measure_again(tiny: Make, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_seconds_of", lambda run, _: 1e-3 * (1 + len(run.rows.tree) / 32))
    model = tiny()
    times = loaded(model)
    (file,) = cache.glob("*.json")
    flat = [[0.01 for _ in own] for own in times.seconds]
    file.write_text(json.dumps(on_disk(cache) | {"measured": [flat]}))
    for starts in range(2, KEPT_MEASUREMENTS + 1):
        again = loaded(model)
        assert len(on_disk(cache)["measured"]) == starts
    assert again(16) > 1.4 * again(1), "and what was wrong is outvoted"
    monkeypatch.setattr(known_times, "measure_briefly", None)
    assert loaded(model).seconds == again.seconds


def test_of_many_measurements_the_newest_count() -> None:
    """As after a version that kept more of them."""
    many = [[[float(number)]] for number in range(1, KEPT_MEASUREMENTS + 3)]
    read = parse_measurements({"rows": [1], "contexts": [64], "measured": many})
    assert [times.seconds for times in read] == many[-KEPT_MEASUREMENTS:]


def test_what_others_disturbed_is_kept_until_something_better_is_there(
    tiny: Make, cache: Path, others: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(seconds: float) -> float:
        measured = PassTimes([*BRIEF_ROWS], [64], [[seconds * rows for rows in BRIEF_ROWS]])
        monkeypatch.setattr(known_times, "measure_briefly", lambda *_: measured)
        return loaded(tiny())(1)

    busy = [0.0, 7.0, 9.0]  # two seconds of processors, in no time
    others += busy
    assert start(3e-3) == pytest.approx(3e-3)
    others += busy
    assert start(2e-3) == pytest.approx(2e-3)
    assert (on_disk(cache)["quiet"], len(on_disk(cache)["measured"])) == (False, 2)
    assert start(1e-3) == pytest.approx(1e-3)
    assert (on_disk(cache)["quiet"], len(on_disk(cache)["measured"])) == (True, 1)
    others += busy
    assert start(1e-5) == pytest.approx(1e-3), "the quiet one serves"
    assert len(on_disk(cache)["measured"]) == 1


def test_a_disturbed_measurement_of_all_sizes_never_replaces_a_quiet_brief_one() -> None:
    brief, whole = PassTimes([1, 4], [64], [[1.0, 2.0]]), PassTimes([1, 2, 4], [64], [[1.0, 1.5, 2.0]])
    quiet = Measurements().with_newest(brief, True)
    assert quiet.with_newest(whole, False) == quiet
    assert Measurements().with_newest(brief, False).with_newest(whole, False).passes == [whole]
    assert quiet.with_newest(whole, True).passes == [whole]


def test_others_are_the_processes_beside_this_one() -> None:
    before = processor_seconds_of_others()
    if before is None:
        pytest.skip("this system does not say how busy its processors are")
    begin, own = time.perf_counter(), time.process_time()
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while time.perf_counter() - begin < 0.3:
            pass  # this process computes too, and must not count
    finally:
        loop.kill()
        loop.wait()
    now, seconds = processor_seconds_of_others(), time.perf_counter() - begin
    left = (os.cpu_count() or 1) * seconds - (time.process_time() - own)
    assert now is not None
    assert 0 < now - before < left + 0.1


def test_a_pass_that_takes_long_is_measured_in_idle_time_alone_and_once(
    tiny: Make, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_seconds_of", lambda *_: 1.0)
    model = tiny()
    loaded(model)
    assert not cache.exists()
    assert idle(model)(1) == pytest.approx(1.0)
    assert len(on_disk(cache)["measured"]) == 1
    monkeypatch.setattr(known_times, "measuring", None)
    assert idle(model)(1) == pytest.approx(1.0)


ANEW = "the times of passes are measured anew"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        "null",
        '{"rows": 1}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.2], [0.1]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": []}',
        '{"rows": [], "contexts": [64], "measured": [[[]]]}',
        '{"rows": [2, 1], "contexts": [64], "measured": [[[0.1, 0.2]]]}',
        '{"rows": [1, "2"], "contexts": [64], "measured": [[[0.1, 0.2]]]}',
        '{"rows": [1, true], "contexts": [64], "measured": [[[0.1, 0.2]]]}',
        '{"rows": [1, 1e9], "contexts": [64], "measured": [[[0.1, 0.2]]]}',
        f'{{"rows": [1, 1{"0" * 400}], "contexts": [64], "measured": [[[0.1, 0.2]]]}}',
        '{"rows": {"1": 2}, "contexts": [64], "measured": [[[0.1, 0.2]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, NaN]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, Infinity]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, -0.2]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.0]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, null]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[["a", "b"]]]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [{"0": [0.1, 0.2]}]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.2]]], "experts": [2.0]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.2]]], "experts": [0.5, NaN]}',
        '{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.2]]], "experts": {"1": 2.0}}',
        "[" * 50_000,
        '{"rows": ' * 5000,
        " " * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\0" * 50,
    ],
    ids=lambda content: repr(content[:70]),
)
@pytest.mark.usefixtures("instant")
def test_a_file_that_is_of_no_use_is_measured_anew(tiny: Make, cache: Path, content: str | bytes) -> None:
    model = tiny()
    loaded(model)
    (file,) = cache.glob("*.json")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=ANEW) as warned:
        assert loaded(model).rows == list(BRIEF_ROWS)
    assert len(warned) == 1
    assert json.loads(file.read_text())["rows"] == list(BRIEF_ROWS)


def test_a_file_of_another_version_is_measured_anew(tiny: Make, cache: Path) -> None:
    model = tiny()
    loaded(model)
    (file,) = cache.glob("*.json")
    file.write_text('{"rows": [1, 2], "contexts": [64], "measured": [[[0.1, 0.2]]]}')
    assert loaded(model).rows == list(BRIEF_ROWS)
    assert json.loads(file.read_text())["rows"] == list(BRIEF_ROWS)


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "dangling link"])
def test_something_else_in_the_file_s_place_is_no_reason_to_stop(tiny: Make, cache: Path, kind: str) -> None:
    model = tiny()
    loaded(model)
    (file,) = cache.glob("*.json")
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "loop" else cache / "nowhere" / "at all")
    with pytest.warns(UserWarning, match=ANEW) as warned:
        assert loaded(model).rows == list(BRIEF_ROWS)
    assert len(warned) == 1


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=ANEW) as warned:
        assert loaded(tiny()).rows == list(BRIEF_ROWS)
    assert len(warned) == 1


def test_a_full_disk_is_no_reason_to_stop(tiny: Make, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pass_times, "write_json", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert loaded(tiny()).rows == list(BRIEF_ROWS)


def test_a_user_without_home_is_no_reason_to_stop(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(RuntimeError):
        Path.home()
    with pytest.warns(UserWarning, match="no home directory"):
        assert loaded(tiny()).rows == list(BRIEF_ROWS)
    assert user_path("~/x") == Path("~/x")
    with pytest.raises(ModelError, match="~/nowhere"):
        open_checkpoint("~/nowhere")


def test_a_short_context_has_a_short_curve(tiny: Make) -> None:
    assert measure_passes(tiny(), 20, repeats=1).rows == [1, 2, 4, 8, 16]


def test_times_follow_the_passes_that_run() -> None:
    """Passes of one row take twice the measured time, and passes of 16 rows three times."""
    times = PassTimes([1, 2, 4, 8, 16, 32], [0], [[1.0, 1.1, 1.2, 1.4, 2.0, 4.0]])
    for _ in range(60):
        times.follow(1, 0, 2.0)
        times.follow(16, 0, 6.0)
    assert times(1) == pytest.approx(2.0, rel=0.02)
    assert times(16) == pytest.approx(6.0, rel=0.02)
    assert times(12) < 6.0
    assert times(4) == pytest.approx(1.2 * 2.4, rel=0.02)  # as it was, but for the scale of all


def test_passes_of_all_sizes_follow_the_machine() -> None:
    """The machine is half as fast for a while, and all passes have one row then."""
    times = PassTimes([1, 2, 4, 8, 16], [0], [[1.0, 1.1, 1.2, 1.4, 2.0]])
    times.follow(8, 0, 1.4)
    for _ in range(100):
        times.follow(1, 0, 2.0)
    assert times(1) == pytest.approx(2.0, rel=0.02)
    assert times(8) / times(1) == pytest.approx(1.4, rel=0.2)
    assert times(16) / times(1) == pytest.approx(2.0, rel=0.2)


def test_one_delayed_pass_is_soon_forgotten() -> None:
    times = PassTimes([1, 16], [0], [[1.0, 2.0]])
    times.follow(1, 0, 1.0)
    times.follow(1, 0, 500.0)
    assert times(1) < 1.2


def test_short_passes_count_when_they_have_settled(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs behind a pass of another size take longer. A long pass is run once."""
    runs: Counter[int] = Counter()

    def seconds_of(run: VerifyPass, device: torch.device) -> float:
        rows = len(run.rows.tree)  # type: ignore[arg-type]
        runs[rows] += 1
        if rows > 4:
            return 0.5
        return 0.002 if runs[rows] > timing.SETTLING else 0.004

    monkeypatch.setattr(timing, "_seconds_of", seconds_of)
    times = measure_passes(tiny(), 20, repeats=1)
    assert times.rows == [1, 2, 4, 8, 16]
    assert times.seconds == [[0.002, 0.002, 0.002, 0.5, 0.5]]
    assert runs == {1: 7, 2: 7, 4: 7, 8: 1, 16: 1}
