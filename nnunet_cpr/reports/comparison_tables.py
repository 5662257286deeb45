"""CSV files and table of a report's comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nnunet_cpr.reports.comparison import Comparison
from nnunet_cpr.reports.metrics import p_text, value_text
from nnunet_cpr.reports.results import UNSEEDED, Condition
from nnunet_cpr.reports.tables import Table
from nnunet_cpr.reports.words import sentence


def comparison_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return ``comparisons.csv``: one row for each comparison in a condition.

    ``difference`` is other - reference in ``unit``; ``p_better``, ``verdict`` and ``advantage_low`` are
    about the trainer, so a negative difference of HD95 is better.
    """
    return _table(
        [
            {**_key(each, "reference"), **_shared(each), **_own(each)}
            for each in comparisons
            if not each.datasets
        ]
    )


def over_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return ``over_datasets.csv``: one row for each comparison over data sets."""
    rows = [
        {
            **_key(each, "reference"),
            **_shared(each),
            "datasets": len(each.datasets),
            "better_on": each.higher_on,
            "p_sign": each.p_sign,
            "without_one_low": each.without_one[0],
            "without_one_high": each.without_one[1],
            "left_out": " ".join(left_out.condition.dataset for left_out in each.left_out),
        }
        for each in comparisons
        if each.datasets
    ]
    return _table(rows).drop(columns="dataset")


def non_inferiority_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return ``non_inferiority.csv``: one row for each comparison with ``non_inferior_to``, as above."""
    rows = [
        {
            **_key(each, "non_inferior_to"),
            "seeds": len(each.seeds),
            "difference": each.difference,
            "advantage_low": each.interval[0],
            "margin": each.margin,
            "p": each.p.non_inferiority,
            "p_holm": each.p_holm.non_inferiority,
            "non_inferior": _shown(each),
        }
        for each in comparisons
        if not each.datasets
    ]
    return _table(rows)


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    # A study of one trainer has no comparison, but files that other programs read.
    return pd.DataFrame(rows, columns=None if rows else [*Condition._fields, "metric", "trainer"])


def _key(n: Comparison, reference: str) -> dict[str, Any]:
    return {
        **n.condition._asdict(),
        "metric": n.metric.name,
        "unit": n.metric.difference_unit,
        reference: n.reference.key,
        "trainer": n.entry.key,
    }


def _shared(n: Comparison) -> dict[str, Any]:
    """Return the columns of comparisons in a condition and over data sets."""
    low, high = n.shown_interval
    above, below = n.deciding.probability_above(n.margin), n.deciding.probability_below(-n.margin)
    return {
        "verdict": n.verdict.value,
        "difference": n.difference,
        "interval_low": low,
        "interval_high": high,
        "p": n.p.difference,
        "p_holm": n.p_holm.difference,
        "margin": n.margin,
        "p_better": above,
        "p_equivalent": 1 - above - below,
        "p_worse": below,
        "advantage_low": n.interval[0],
        "p_tost": n.p.equivalence,
        "p_tost_holm": n.p_holm.equivalence,
        "smallest_margin": n.smallest_margin,
        "comparisons": n.compared,
        "failed_cases": n.failures.entry,
        "failed_cases_reference": n.failures.reference,
        "sentence": sentence(n),
    }


def _own(n: Comparison) -> dict[str, Any]:
    """Return the columns of comparisons in a condition only."""
    bootstrap = sorted(n.metric.sign * end for end in n.bootstrap)
    return {
        "folds": " ".join(map(str, n.folds)),
        "seeds": " ".join(str(seed) for seed in n.seeds if seed != UNSEEDED),
        "bootstrap_low": bootstrap[0],
        "bootstrap_high": bootstrap[1],
        "p_corrected_t": n.tests[0].p,
        "p_fold_seed": n.tests[1].p,
        "cases": len(n.gains_of_cases),
        "cases_better": int((n.gains_of_cases > 0).sum()),
        "cases_worse": int((n.gains_of_cases < 0).sum()),
        "cases_left_out": n.cases_left_out,
        "cases_marked": n.cases_marked,
        "test_ratio": n.ratio.value,
        "test_ratio_from": n.ratio.source,
    }


def shown_comparisons(comparisons: Sequence[Comparison]) -> Table:
    """Return the numbers of the comparisons of one condition with one reference as text."""
    numbers = comparison_table(comparisons)
    differences = numbers[["difference", "interval_low", "interval_high"]].map(value_text, style="+.2f")
    probabilities = numbers[["p_better", "p_equivalent", "p_worse"]].map(value_text)
    shown = {
        "metric": [each.metric.title for each in comparisons],
        "verdict": numbers["verdict"],
        "difference": differences.pop("difference"),
        "95 % interval": differences.agg(" to ".join, axis=1),
        "p after Holm": numbers["p_holm"].map(p_text),
        "P(better / equivalent / worse)": probabilities.agg(" / ".join, axis=1),
        "non-inferior": [_shown(each) for each in comparisons],
        "folds x seeds": [f"{len(c.folds)} x {len(c.seeds)}" for c in comparisons],
    }
    titles = pd.Index([each.entry.full_title for each in comparisons], name="trainer")
    caption = f"Differences to {comparisons[0].reference.full_title}"
    return Table(caption, pd.DataFrame(shown).set_index(titles))


def _shown(n: Comparison) -> str:
    return "shown" if n.is_non_inferior else "not shown"
