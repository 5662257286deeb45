"""Which method of a sweep is best when each is tuned on validation data? For the results page.

    python -m benchmarks.vision.compare benchmarks/vision/cifar10.yaml --results vision-results

Of each method the setting with the best mean validation accuracy is taken, of those with the most
finished runs and no diverged one. Its accuracy on test data is compared with that of another method
(``comparisons.yaml``) by Welch's test, with Bonferroni's correction for all comparisons of the sweep.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd
import yaml
from scipy.stats import ttest_ind

from nnunet_cpr.vision.sweep import CONFIDENCE, load_sweep, read_results

COMPARISONS = Path(__file__).with_name("comparisons.yaml")
SELECTION = "validation_accuracy"
"""Metric that chooses a setting."""


def select_settings(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the runs of the best setting of each method, without rows if no setting can be chosen.

    Args:
        runs: the table of :func:`~nnunet_cpr.vision.sweep.read_results`.
    """
    chosen = {}
    for method, own in runs.groupby("method", sort=False):
        settings = own.groupby("run", sort=False)
        table = pd.DataFrame({"score": settings[SELECTION].mean(), "n": settings[SELECTION].count()})
        table = table[(settings["diverged"].count() == 0) & (table["n"] > 0)]
        table = table[table["n"] == table["n"].max()]
        best = table["score"].idxmax() if len(table) else None
        chosen[str(method)] = own[(own["run"] == best) & own[SELECTION].notna()]
    return chosen


def compare_methods(runs: pd.DataFrame, references: dict[str, str]) -> pd.DataFrame:
    """Return a row for each method: its chosen setting, and the difference from its reference.

    Args:
        runs: the table of :func:`~nnunet_cpr.vision.sweep.read_results`.
        references: the method that a method is compared with.

    Returns:
        ``method``; ``run``, the chosen setting; ``selection``, its mean validation accuracy; ``n``,
        ``mean`` and ``std`` of its accuracy; ``compared_with``; ``difference`` of the mean from that
        method's, its 95 % interval from ``low`` to ``high``, and the corrected ``p``.
    """
    chosen = select_settings(runs)
    rows = []
    for method, own in chosen.items():
        values = own["accuracy"]
        row = {
            "method": method,
            "run": own["run"].iloc[0] if len(own) else "",
            "selection": own[SELECTION].mean(),
            "n": len(own),
            "mean": values.mean(),
            "std": values.std(),
            "compared_with": references.get(method, ""),
            **dict.fromkeys(("difference", "low", "high", "p"), math.nan),
        }
        other = chosen[references[method]]["accuracy"] if method in references else values[:0]
        if min(len(values), len(other)) > 1:
            test = ttest_ind(values, other, equal_var=False)
            row["difference"] = values.mean() - other.mean()
            row["low"], row["high"] = test.confidence_interval(CONFIDENCE)
            row["p"] = min(1.0, test.pvalue * len(references))
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Read the results of a sweep, print the comparisons and write them beside the sweep's table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="YAML file of the sweep")
    parser.add_argument("--results", type=Path, default=Path("vision-results"))
    arguments = parser.parse_args()
    name = arguments.sweep.stem
    runs = read_results(load_sweep(arguments.sweep), arguments.results)
    table = compare_methods(runs, yaml.safe_load(COMPARISONS.read_text())[name])
    table.to_csv(arguments.results / f"{name}-methods.csv", index=False, float_format="%.6g")
    print(table.to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    main()
