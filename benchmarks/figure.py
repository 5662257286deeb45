"""Figure of :mod:`benchmarks.step_time`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.competitors import ADAM, BASE, SGD
from nnunet_cpr.figures import new_figure

_OURS = ("AdamCPR", "SGDCPR")


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the ratios to torch's fused step: bars for each network, lines for the sweeps.

    Args:
        document: the JSON document of :mod:`benchmarks.step_time`.
        path: figure to write.
    """
    results, sweeps = document["networks"], document["sweeps"]
    bars = max(sum(len(r[f]) for r in results.values()) for f in (ADAM, SGD))
    height = max(3.0, 0.17 * bars + 0.4 * len(results))
    lines = any(sweeps.values())
    machine = document["machine"]
    processor = machine.get("gpu", machine["processor"])
    with new_figure(path, (13, height + (4.2 if lines else 0))) as figure:
        figure.suptitle(
            f"Time of an optimizer step relative to torch's fused step ({document['device']}: "
            f"{processor}, {machine['threads']} threads, torch {machine['torch']})"
        )
        grid = figure.add_gridspec(2 if lines else 1, 2, height_ratios=[height, 4] if lines else [1])
        for column, family in enumerate((SGD, ADAM)):
            _draw_bars(figure.add_subplot(grid[0, column]), results, family)
        for column, (kind, label) in enumerate(
            (("parameters", "parameters, in 100 tensors"), ("tensors", "tensors of 32 M parameters"))
        ):
            if lines:
                _draw_lines(figure.add_subplot(grid[1, column]), sweeps.get(kind, {}), label)


def _draw_bars(axes: Axes, results: dict[str, Any], family: str) -> None:
    y, ticks, labels = 0.0, [], []
    for network, families in results.items():
        axes.text(0.52, y - 0.6, network, fontsize=9, fontweight="bold", va="bottom")
        for name, timing in families[family].items():
            color = "C1" if name in _OURS else "0.35" if name == BASE[family] else "0.7"
            axes.barh(y, timing["ratio"], color=color, height=0.8)
            axes.text(timing["ratio"] * 1.03, y, f"{timing['ratio']:.2f}", fontsize=7, va="center")
            ticks.append(y)
            labels.append(name)
            y += 1
        y += 1.4
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.set_xlim(min(0.5, left), right * 1.3)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(y - 0.8, -1.8)
    axes.axvline(1, color="0.35", linewidth=0.8)
    axes.set_xlabel(f"times {BASE[family]} (median of the rounds' ratios)")
    axes.set_title(family)


def _draw_lines(axes: Axes, swept: dict[Any, Any], label: str) -> None:
    names = dict.fromkeys(name for timings in swept.values() for name in timings)
    for name in names:
        if name in BASE.values():
            continue
        points = [(int(x), t[name]["ratio"]) for x, t in swept.items() if name in t]
        style = "-" if name in _OURS else "--"
        color = "C1" if name.startswith(("Adam", "pytorch")) else "C0"
        marker = "s" if name.startswith("pytorch") else "o"
        axes.plot(*zip(*points), style, color=color, marker=marker, markersize=4, label=name)
    axes.axhline(1, color="0.35", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("times torch's fused step")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.4)  # room for the legend
    axes.legend(fontsize=8, loc="upper left")
