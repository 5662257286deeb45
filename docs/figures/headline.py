"""Draw the figure of the README: measured differences to weight decay with their intervals.

    python docs/figures/headline.py

The values are those of ``comparisons.csv`` in the report of the study with three seeds in
``docs/reference/results.md``, copied to ``docs/figures/data/hippocampus_seeds.csv``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
NAMES = {"dice": "Dice", "nsd": "NSD, 2 mm"}


def main() -> None:
    """Write ``headline.png`` beside this file."""
    values = pd.read_csv(HERE / "data" / "hippocampus_seeds.csv").set_index("metric").loc[list(NAMES)]
    margin = values["margin"].iloc[0]
    figure, ax = plt.subplots(figsize=(8, 2.3), layout="constrained")
    ax.axvspan(-margin, margin, color="0.88", label=f"counts as equivalent, ±{margin:g} points")
    ax.axvline(0, color="0.4", linewidth=0.8)
    for row, (_, each) in enumerate(values.iterrows()):
        low, high = each["interval_low"], each["interval_high"]
        ax.plot([low, high], [row, row], color="#00796b", linewidth=3, solid_capstyle="butt")
        ax.plot(each["difference"], row, "o", color="#00796b", markersize=9)
        text = f"{each['difference']:+.2f} ({low:+.2f} to {high:+.2f}): {each['verdict']}"
        ax.annotate(text, (each["difference"], row), (0, 11), textcoords="offset points", ha="center")
    ax.set_yticks(range(len(NAMES)), NAMES.values())
    ax.set_ylim(len(NAMES) - 0.5, -0.7)
    ax.set_xlabel("Adam + CPR minus AdamW, points, with 95 % interval")
    ax.set_title(
        "Hippocampus MRI, 3 seeds x 2 folds, 104 held-out cases; 250 steps, small network", fontsize=10
    )
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "headline.png", dpi=110)


if __name__ == "__main__":
    main()
