"""Draw all differences of a study on real data with their intervals.

    python docs/figures/differences.py methods

draws ``docs/figures/data/methods.csv``, the ``comparisons.csv`` of the report of
``benchmarks/real_data/studies/methods.yaml``, as ``docs/figures/methods.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from nnunet_cpr._figures import new_figure
from nnunet_cpr.studies.definition import load

HERE = Path(__file__).parent
STUDIES = HERE.parents[1] / "benchmarks" / "real_data" / "studies"
WIDEST = 5.0
"""Differences in points that are larger are written at the border."""


def main(name: str) -> None:
    """Write the figure of a study."""
    study = load(str(STUDIES / f"{name}.yaml"))
    rows = pd.read_csv(HERE / "data" / f"{name}.csv").query("metric == 'dice'")
    near = rows[rows["difference"].abs() < WIDEST]
    reach = 1.05 * max(-near["interval_low"].min(), near["interval_high"].max())
    margin = rows["margin"].iloc[0]
    with new_figure(HERE / f"{name}.png", (8, 0.8 + 0.28 * len(rows))) as figure:
        axes = figure.add_subplot()
        axes.axvspan(-margin, margin, color="0.88", label=f"counts as equivalent, ±{margin:g} points")
        axes.axvline(0, color="0.4", linewidth=0.8)
        for row, (_, each) in enumerate(rows.iterrows()):
            low, high = each["interval_low"], each["interval_high"]
            text = f"{each['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
            if abs(each["difference"]) < WIDEST:
                axes.plot([low, high], [row, row], color="#00796b", linewidth=2.5)
                axes.plot(each["difference"], row, "o", color="#00796b")
                axes.annotate(text, (1.02, row), xycoords=("axes fraction", "data"), va="center", size=8)
            else:
                side = 0.02 if each["difference"] < 0 else 0.98
                axes.annotate(
                    f"{text}: outside",
                    (side, row),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    ha="left" if side < 0.5 else "right",
                    size=8,
                )
        titles = [study.entry(trainer).title for trainer in rows["trainer"]]
        axes.set_yticks(range(len(rows)), titles, size=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        reference = study.entry(study.reference).title
        axes.set_xlabel(f"Dice minus that of: {reference}; points, with 95 % interval", size=9)
        axes.legend(loc="lower left", fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(*sys.argv[1:])
