"""CSV files and table of a report's comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nnunet_cpr.reports.comparison import Judged, Numbers
from nnunet_cpr.reports.metrics import p_text, value_text
from nnunet_cpr.reports.over_datasets import OverDatasets
from nnunet_cpr.reports.results import UNSEEDED, Condition
from nnunet_cpr.reports.tables import Table
from nnunet_cpr.reports.words import sentence


def comparison_table(comparisons: Sequence[Judged[Numbers]]) -> pd.DataFrame:
    """Return ``comparisons.csv``: one row for each comparison.

    ``difference`` is other - reference in ``unit``; ``p_better``, ``verdict`` and ``advantage_low`` are
    about the trainer, so a negative difference of HD95 is better.
    """
    return _table([{**_key(each, "reference"), **_shared(each), **_own(each)} for each in comparisons])


def over_table(comparisons: Sequence[Judged[OverDatasets]]) -> pd.DataFrame:
    """Return ``over_datasets.csv``: one row for each comparison over data sets."""
    rows = [
        {
            **_key(each, "reference"),
            **_shared(each),
            "datasets": len(each.numbers.datasets),
            "better_on": each.numbers.higher_on,
            "p_sign": each.numbers.p_sign,
            "without_one_low": each.numbers.without_one[0],
            "without_one_high": each.numbers.without_one[1],
            "left_out": " ".join(left_out.condition.dataset for left_out in each.numbers.left_out),
        }
        for each in comparisons
    ]
    return _table(rows).drop(columns="dataset")


def non_inferiority_table(comparisons: Sequence[Judged[Numbers]]) -> pd.DataFrame:
    """Return ``non_inferiority.csv``: one row for each comparison with ``non_inferior_to``."""
    rows = [
        {
            **_key(each, "non_inferior_to"),
            "seeds": len(each.numbers.seeds),
            "difference": each.numbers.difference,
            "advantage_low": each.numbers.interval[0],
            "margin": each.numbers.margin,
            "p": each.numbers.p_non_inferior,
            "p_holm": each.p_holm.non_inferiority,
            "non_inferior": _shown(each),
        }
        for each in comparisons
    ]
    return _table(rows)


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    # A study of one trainer has no comparison, but files that other programs read.
    return pd.DataFrame(rows, columns=None if rows else [*Condition._fields, "metric", "trainer"])


def _key(judged: Judged[Any], reference: str) -> dict[str, Any]:
    n = judged.numbers
    return {
        **n.condition._asdict(),
        "metric": n.metric.name,
        "unit": n.metric.difference_unit,
        reference: n.reference.key,
        "trainer": n.entry.key,
    }


def _shared(judged: Judged[Any]) -> dict[str, Any]:
    """Return the columns of comparisons in a condition and over data sets."""
    n = judged.numbers
    low, high = n.shown_interval
    above, below = n.deciding.probability_above(n.margin), n.deciding.probability_below(-n.margin)
    return {
        "verdict": judged.verdict.value,
        "difference": n.difference,
        "interval_low": low,
        "interval_high": high,
        "p": n.p,
        "p_holm": judged.p_holm.difference,
        "margin": n.margin,
        "p_better": above,
        "p_equivalent": 1 - above - below,
        "p_worse": below,
        "advantage_low": n.interval[0],
        "p_tost": n.p_equivalent,
        "p_tost_holm": judged.p_holm.equivalence,
        "smallest_margin": judged.smallest_margin,
        "comparisons": judged.compared,
        "failed_cases": n.failures.entry,
        "failed_cases_reference": n.failures.reference,
        "sentence": sentence(judged),
    }


def _own(judged: Judged[Numbers]) -> dict[str, Any]:
    """Return the columns of comparisons in a condition only."""
    n = judged.numbers
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


def shown_comparisons(comparisons: Sequence[Judged[Numbers]]) -> Table:
    """Return the numbers of the comparisons of one condition with one reference as text."""
    numbers = comparison_table(comparisons)
    differences = numbers[["difference", "interval_low", "interval_high"]].map(value_text, style="+.2f")
    probabilities = numbers[["p_better", "p_equivalent", "p_worse"]].map(value_text)
    shown = {
        "metric": [each.numbers.metric.title for each in comparisons],
        "verdict": numbers["verdict"],
        "difference": differences.pop("difference"),
        "95 % interval": differences.agg(" to ".join, axis=1),
        "p after Holm": numbers["p_holm"].map(p_text),
        "P(better / equivalent / worse)": probabilities.agg(" / ".join, axis=1),
        "non-inferior": [_shown(each) for each in comparisons],
        "folds x seeds": [f"{len(c.numbers.folds)} x {len(c.numbers.seeds)}" for c in comparisons],
    }
    titles = pd.Index([each.numbers.entry.full_title for each in comparisons], name="trainer")
    caption = f"Differences to {comparisons[0].numbers.reference.full_title}"
    return Table(caption, pd.DataFrame(shown).set_index(titles))


def _shown(judged: Judged[Any]) -> str:
    return "shown" if judged.is_non_inferior else "not shown"
