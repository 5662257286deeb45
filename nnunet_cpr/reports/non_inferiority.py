"""Non-inferiority: which trainers are shown not to be worse than a named one by more than a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from nnunet_cpr.reports.comparisons import Comparison, compare_with
from nnunet_cpr.reports.results import SETTING, Results, Setting
from nnunet_cpr.reports.selection import select_settings
from nnunet_cpr.reports.statistics import LEVEL, MIN_SEEDS, holm, p_number
from nnunet_cpr.reports.verdicts import tabled, withheld


@dataclass(frozen=True)
class NonInferiority:
    """Result of one trainer.

    Attributes:
        comparison: the comparison with the named trainer.
        p_holm: one-sided p after Holm's correction over all trainers, metrics and settings.
        is_shown: True if non-inferiority is shown: p_holm below 0.05, the bootstrap interval above
            -margin, the main table's means too, and at least three seeds and two folds.
        sentence: the result in words.
    """

    comparison: Comparison
    p_holm: float
    is_shown: bool
    sentence: str


def non_inferiorities(results: Results) -> list[NonInferiority]:
    """Return the results of all trainers but the study's ``non_inferior_to``."""
    study = results.study
    selection = select_settings(results) if study.select else None
    named = study.entry(study.non_inferior_to) if selection is None else selection.non_inferior_to
    found = [c for c in compare_with(results, named, selection) if not c.same_method]
    return [
        _judge(comparison, p)
        for comparison, p in zip(found, holm([comparison.p_non_inferior for comparison in found]))
    ]


def in_words(found: Sequence[NonInferiority], setting: Setting) -> list[str]:
    """Return the sentences of a setting, one for all trainers with fewer seeds than a test needs."""
    here = [each for each in found if each.comparison.setting == setting]
    untested = [each.comparison for each in here if _lacks_seeds(each.comparison)]
    trainers = {c.entry.trainer for c in untested}
    if len(trainers) < 2:
        return [each.sentence for each in here]
    return [
        *(each.sentence for each in here if not _lacks_seeds(each.comparison)),
        f"Non-inferiority to {untested[0].reference.full_title} was not tested for {len(trainers)} "
        f"trainers: expected at least {MIN_SEEDS} seeds.",
    ]


def non_inferiority_table(found: Sequence[NonInferiority]) -> pd.DataFrame:
    """Return ``non_inferiority.csv``: one row for each trainer, metric and setting."""
    columns = [
        *SETTING,
        *(
            "metric",
            "unit",
            "non_inferior_to",
            "trainer",
            "seeds",
            "difference",
            "advantage_low",
            "margin",
        ),
        *("p", "p_holm", "non_inferior", "sentence"),
    ]
    rows = [
        {
            **each.comparison.setting._asdict(),
            "metric": each.comparison.metric.name,
            "unit": each.comparison.metric.difference_unit,
            "non_inferior_to": each.comparison.reference.trainer,
            "trainer": each.comparison.entry.trainer,
            "seeds": each.comparison.difference.seeds,
            "difference": each.comparison.difference.mean,
            "advantage_low": each.comparison.advantage_low,
            "margin": each.comparison.margin,
            "p": each.comparison.p_non_inferior,
            "p_holm": each.p_holm,
            "non_inferior": "shown" if each.is_shown else "not shown",
            "sentence": each.sentence,
        }
        for each in found
    ]
    return pd.DataFrame(rows, columns=columns)


def _judge(c: Comparison, p_holm: float) -> NonInferiority:
    d = c.difference
    lowest = d.bootstrap_low if c.metric.higher_is_better else -d.bootstrap_high
    is_clear = p_holm < LEVEL and min(lowest, c.tabled_gain) > -c.margin and not withheld(c)
    is_shown = len(c.seeds) >= MIN_SEEDS and is_clear
    names = f"{c.entry.full_title} is {'' if is_shown else 'not shown to be '}non-inferior to"
    unit = c.metric.difference_unit
    margin = c.metric.amount(c.margin)
    text = f"{names} {c.reference.full_title} by {c.metric.title} at a margin of {margin}"
    if not d.folds:
        text += ": no run with values that both have finished."
    elif _lacks_seeds(c):
        text += f": expected at least {MIN_SEEDS} seeds, got {d.seeds}."
    else:
        limit = c.metric.difference_text(c.advantage_low)
        text += f": its advantage is at least {limit} {unit} (one-sided 95 % limit)"
        if not is_shown and c.p_non_inferior < LEVEL:
            text += f"; {_reason(c, p_holm, lowest)}"
        text += "."
    return NonInferiority(c, p_holm, is_shown, text)


def _lacks_seeds(c: Comparison) -> bool:
    return c.difference.folds > 0 and len(c.seeds) < MIN_SEEDS


def _reason(c: Comparison, p_holm: float, lowest: float) -> str:
    """Return why a limit above -margin does not show non-inferiority."""
    if reason := withheld(c):
        return reason
    if lowest <= -c.margin:
        low = c.metric.difference_text(lowest)
        return f"the bootstrap interval over cases and seeds begins at {low}"
    if c.tabled_gain <= -c.margin:
        return tabled(c)
    return f"p is {p_number(p_holm)} after Holm's correction"
