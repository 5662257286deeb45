"""CSV files and table of a report's comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nnunet_cpr.reports.metrics import difference_text, p_text, value_text
from nnunet_cpr.reports.numbers import Numbers
from nnunet_cpr.reports.over_datasets import OverDatasets
from nnunet_cpr.reports.results import UNSEEDED
from nnunet_cpr.reports.sentences import sentence
from nnunet_cpr.reports.tables import Table
from nnunet_cpr.reports.verdicts import Judged

_KEY = ["dataset", "configuration", "plans", "metric", "unit", "reference", "trainer"]
_NUMBERS = [
    *("verdict", "folds", "seeds", "difference", "interval_low", "interval_high"),
    *("bootstrap_low", "bootstrap_high", "p_corrected_t", "p_fold_seed", "p", "p_holm", "margin"),
    *("p_better", "p_equivalent", "p_worse", "advantage_low"),
    *("cases", "cases_better", "cases_worse", "cases_left_out", "sentence"),
    *("p_tost", "p_tost_holm", "smallest_margin", "comparisons", "test_ratio", "test_ratio_from"),
]
_NON_INFERIORITY = [
    *("dataset", "configuration", "plans", "metric", "unit", "non_inferior_to", "trainer"),
    *("seeds", "difference", "advantage_low", "margin", "p", "p_holm", "non_inferior"),
]


def comparison_table(comparisons: Sequence[Judged[Numbers]]) -> pd.DataFrame:
    """Return ``comparisons.csv``: one row for each comparison.

    ``difference`` is other - reference in ``unit``; ``p_better``, ``verdict`` and ``advantage_low`` are
    about the trainer, so a negative difference of HD95 is better.
    """
    rows = [{**_key(each), **_numbers(each)} for each in comparisons]
    return pd.DataFrame(rows, columns=[*_KEY, *_NUMBERS])


def _key(judged: Judged[Any]) -> dict[str, Any]:
    n = judged.numbers
    return {
        **n.setting._asdict(),
        "metric": n.metric.name,
        "unit": n.metric.difference_unit,
        "reference": n.reference.trainer,
        "trainer": n.entry.trainer,
    }


def _numbers(judged: Judged[Numbers]) -> dict[str, Any]:
    n = judged.numbers
    interval, bootstrap = (
        sorted(n.metric.sign * end for end in ends) for ends in (n.interval, n.bootstrap)
    )
    above, below = n.deciding.probability_above(n.margin), n.deciding.probability_below(-n.margin)
    return {
        "verdict": judged.verdict.value,
        "folds": " ".join(map(str, n.folds)),
        "seeds": " ".join(str(seed) for seed in n.seeds if seed != UNSEEDED),
        "difference": n.difference,
        "interval_low": interval[0],
        "interval_high": interval[1],
        "bootstrap_low": bootstrap[0],
        "bootstrap_high": bootstrap[1],
        "p_corrected_t": n.tests[0].p,
        "p_fold_seed": n.tests[1].p,
        "p": n.p,
        "p_holm": judged.p_holm.difference,
        "margin": n.margin,
        "p_better": above,
        "p_equivalent": 1 - above - below,
        "p_worse": below,
        "advantage_low": n.advantage_low,
        "cases": n.cases,
        "cases_better": int((n.gains_of_cases > 0).sum()),
        "cases_worse": int((n.gains_of_cases < 0).sum()),
        "cases_left_out": n.cases_left_out,
        "sentence": sentence(judged),
        "p_tost": n.p_equivalent,
        "p_tost_holm": judged.p_holm.equivalence,
        "smallest_margin": judged.smallest_margin,
        "comparisons": judged.compared,
        "test_ratio": n.ratio.value,
        "test_ratio_from": n.ratio.source,
    }


def over_table(comparisons: Sequence[Judged[OverDatasets]]) -> pd.DataFrame:
    """Return ``over_datasets.csv``: one row for each comparison over data sets."""
    rows = []
    for judged in comparisons:
        n = judged.numbers
        low, high = sorted(n.metric.sign * end for end in n.interval)
        rows.append(
            {
                **{key: value for key, value in _key(judged).items() if key != "dataset"},
                "verdict": judged.verdict.value,
                "datasets": len(n.datasets),
                "better_on": n.better_on,
                "difference": n.difference,
                "interval_low": low,
                "interval_high": high,
                "p": n.p,
                "p_holm": judged.p_holm.difference,
                "margin": n.margin,
                "p_tost_holm": judged.p_holm.equivalence,
                "p_non_inferior_holm": judged.p_holm.non_inferiority,
                "smallest_margin": judged.smallest_margin,
                "left_out": " ".join(each.setting.dataset for each in n.left_out),
            }
        )
    return pd.DataFrame(rows)


def non_inferiority_table(comparisons: Sequence[Judged[Numbers]]) -> pd.DataFrame:
    """Return ``non_inferiority.csv``: one row for each comparison with ``non_inferior_to``."""
    rows = [
        {
            **_key(each),
            "non_inferior_to": each.numbers.reference.trainer,
            "seeds": len(each.numbers.seeds),
            "difference": each.numbers.difference,
            "advantage_low": each.numbers.advantage_low,
            "margin": each.numbers.margin,
            "p": each.numbers.p_non_inferior,
            "p_holm": each.p_holm.non_inferiority,
            "non_inferior": "shown" if each.is_non_inferior else "not shown",
        }
        for each in comparisons
    ]
    return pd.DataFrame(rows, columns=_NON_INFERIORITY)


def shown_comparisons(comparisons: Sequence[Judged[Numbers]]) -> Table:
    """Return the numbers of the comparisons of one setting with one reference as text."""
    rows = []
    for judged in comparisons:
        n, csv = judged.numbers, _numbers(judged)
        rows.append(
            {
                "metric": n.metric.title,
                "verdict": csv["verdict"],
                "difference": difference_text(n.difference),
                "95 % interval": " to ".join(
                    map(difference_text, (csv["interval_low"], csv["interval_high"]))
                ),
                "p after Holm": p_text(judged.p_holm.difference),
                "P(better / equivalent / worse)": " / ".join(
                    value_text(csv[name]) for name in ("p_better", "p_equivalent", "p_worse")
                ),
                "non-inferior": "shown" if judged.is_non_inferior else "not shown",
                "folds x seeds": f"{len(n.folds)} x {len(n.seeds)}",
            }
        )
    index = pd.Index([each.numbers.entry.full_title for each in comparisons], name="trainer")
    caption = f"Differences to {comparisons[0].numbers.reference.full_title}"
    return Table(caption, pd.DataFrame(rows, index=index))
