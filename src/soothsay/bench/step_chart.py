"""The chart of `soothsay bench step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soothsay.bench.step import StepReport
from soothsay.plotting import new_figure, tidy


def step_chart(report: StepReport) -> Any:
    """Draw the times of passes by their rows: a panel for each context, a colour for each dtype.

    Solid lines are measured times, dashed lines their floors. Returns a matplotlib figure. Raises
    `SoothsayError` if matplotlib is not installed.
    """
    contexts = sorted({time.context for time in report.times})
    dtypes = list(dict.fromkeys(time.dtype for time in report.times))
    figure = new_figure(figsize=(1 + 4.5 * len(contexts), 4.2), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for panel, context in zip(panels, contexts, strict=True):
        for number, dtype in enumerate(dtypes):
            times = [time for time in report.times if (time.dtype, time.context) == (dtype, context)]
            rows, colour = [time.rows for time in times], f"C{number}"
            panel.plot(rows, [time.ms for time in times], "o-", color=colour, label=dtype)
            panel.plot(rows, [time.floor_ms for time in times], "--", color=colour, alpha=0.7)
            panel.set_xscale("log", base=2)
            panel.set_xticks(rows, [str(count) for count in rows])
        panel.minorticks_off()
        tidy(panel)
        panel.set_title(f"context of {context:,} tokens", fontsize=10)
        panel.set_xlabel("rows in the pass")
    panels[0].set_ylim(bottom=0)  # after all lines are drawn: it also fixes the top
    panels[0].set_ylabel("milliseconds a forward pass")
    panels[0].plot([], [], "--", color="grey", label="floor")
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"{Path(report.model).name}: {report.threads} threads, {report.bandwidth / 1e9:.0f} GB/s, "
        f"trees: {report.layout}",
        fontsize=10,
    )
    return figure
