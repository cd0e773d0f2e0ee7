"""The chart of `soothsay bench peers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soothsay.bench.peers.peer_results import OURS, PeerResults
from soothsay.plotting import new_figure


def answers_chart(results: PeerResults, dtypes: Sequence[str]) -> Any:
    """Draw tokens a second of whole answers by task: a panel for each dtype, a colour for each contestant.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    shown = {dtype: rates for dtype in dtypes if (rates := results.rates(dtype))}
    figure = new_figure(figsize=(9, 1 + 2.8 * max(len(shown), 1)), layout="constrained")
    panels = figure.subplots(max(len(shown), 1), 1, squeeze=False)[:, 0]
    everyone = {one for rates in shown.values() for one in rates["overall"]}  # not every dtype has them all
    colours = {one: f"C{i}" for i, one in enumerate(sorted(everyone, key=lambda one: (one[0] != OURS, one)))}
    handles = {}
    for panel, (dtype, rates) in zip(panels, shown.items(), strict=False):
        contestants = [one for one in colours if one in rates["overall"]]
        width = 0.8 / len(contestants)
        for number, one in enumerate(contestants):
            places = [task - 0.4 + width * (number + 0.5) for task in range(len(rates))]
            heights = [of[one] for of in rates.values()]
            handles[one] = panel.bar(places, heights, width, color=colours[one], label=", ".join(one))
        panel.set_xticks(range(len(rates)), [task.replace("_", " ") for task in rates])
        panel.tick_params(axis="x", length=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"weights in {dtype}", fontsize=10)
        panel.set_ylabel("tokens a second")
    bars = [handles[one] for one in colours]
    figure.legend(handles=bars, loc="outside lower center", frameon=False, ncols=3)
    return figure
