"""Verdicts: what the comparisons of a report allow to say, as a word and as a sentence."""

from __future__ import annotations

import math
from dataclasses import replace

from nnunet_cpr.reports.comparisons import Comparison, compare_with
from nnunet_cpr.reports.results import Results
from nnunet_cpr.reports.selection import select_settings
from nnunet_cpr.reports.statistics import (
    LEVEL,
    MIN_FOLDS,
    MIN_SEEDS,
    holm,
    p_number,
    reach_with,
    seeds_for,
)

CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds and 2 folds. With fewer seeds the numbers "
    "describe these trainings only: another training of the same method can differ by more."
)
_NOT_SIGNIFICANT = "the difference is not statistically significant"
PROBABLE = 0.95
"""Probability from which two methods are called equivalent."""


def compare_all(results: Results) -> list[Comparison]:
    """Return all comparisons with the reference, with verdicts after Holm's correction over them."""
    study = results.study
    selection = select_settings(results) if study.select else None
    reference = study.entry(study.reference) if selection is None else selection.reference
    found = compare_with(results, reference, selection)
    return [
        _with_verdict(results, replace(comparison, p_holm=p))
        for comparison, p in zip(found, holm([comparison.p for comparison in found]))
    ]


def _with_verdict(results: Results, c: Comparison) -> Comparison:
    d = c.difference
    within = -c.margin < d.bootstrap_low and d.bootstrap_high < c.margin
    verdict = "undecided"
    if len(c.seeds) < MIN_SEEDS or c.same_method or not d.folds or withheld(c):
        pass
    elif c.equivalence.equivalent >= PROBABLE and within and not _table_differs(c):
        verdict = "equivalent"
    elif _is_significant(c) and not _table_contradicts(c):
        verdict = "better" if c.gain > 0 else "worse"
    c = replace(c, verdict=verdict)
    return replace(c, sentence=_sentence(results, c))


def withheld(c: Comparison) -> str:
    """Return why the values do not allow a verdict, an empty text if they do."""
    if c.cases_left_out:
        return (
            f"{_count(c.cases_left_out, 'case')} with a {c.metric.title} from one of the two only are "
            "left out of the difference, such as cases where only one predicts a structure "
            "that is absent"
        )
    if c.difference.folds < MIN_FOLDS:
        return "one fold does not show how the difference varies between folds"
    return ""


def tabled(c: Comparison) -> str:
    """Return the difference of the main table's means in words."""
    amount = f"{c.metric.difference_text(c.tabled_difference)} {c.metric.difference_unit}"
    way = " the other way," if _table_contradicts(c) else ""
    return f"the means of the main table, over classes, differ{way} by {amount}"


def _table_differs(c: Comparison) -> bool:
    return abs(c.tabled_difference) > c.margin


def _table_contradicts(c: Comparison) -> bool:
    return c.tabled_gain * c.gain < 0


def _is_significant(c: Comparison) -> bool:
    return c.p_holm < LEVEL and c.difference.has_bootstrap_interval_without_zero


def _sentence(results: Results, c: Comparison) -> str:
    d, m = c.difference, c.metric
    names = f"{c.entry.full_title} and {c.reference.full_title}"
    if not d.folds:
        return (
            f"{names} cannot be compared by {m.title}: expected a run with values that both have "
            "finished, got none."
        )
    amount = f"{m.difference_text(d.mean)} {m.difference_unit}"
    sample = f"{_count(d.folds, 'fold')}, {_count(max(d.seeds, 1), 'seed')}, {_count(d.cases, 'case')}"
    what = f"of {m.title}"
    margin = f"\u00b1{m.amount(c.margin)}"
    if c.same_method:
        text = (
            f"{names} are trainings of one method with different seeds: {amount} {what} ({sample}). "
            "List the seeds as seeds in the study, so that they are pooled."
        )
    elif len(c.seeds) < MIN_SEEDS:
        text = (
            f"These trainings of {c.entry.full_title} differ from those of {c.reference.full_title} by "
            f"{amount} {what} ({sample}). Undecided: with {_count(max(d.seeds, 1), 'seed')} the report "
            "cannot tell whether the methods differ, since another training of the same method can "
            f"differ{_spread(c)}. {_advice(c)}"
        )
    else:
        numbers = (
            f"{amount} {what} (95 % interval {m.difference_text(d.low)} to {m.difference_text(d.high)}, "
            f"p {_relation(c.p_holm)} after Holm's correction, {sample})"
        )
        if c.verdict == "equivalent":
            text = (
                f"{names} are equivalent within {margin} {what}, with probability "
                f"{c.equivalence.equivalent:.2f}: {numbers}."
            )
            if _is_significant(c):
                text += " The difference is statistically significant, but within the margin."
        elif c.verdict in ("better", "worse"):
            text = f"{c.entry.full_title} is {c.verdict} than {c.reference.full_title}: {numbers}."
        else:
            text = f"Undecided between {names}: {_reason(c)}, {numbers}"
            text += (
                f"; it is within {margin} with probability {c.equivalence.equivalent:.2f}. {_advice(c)}"
            )
    planned = len(results.study.folds) * len(results.seeds)
    if len(c.folds) * len(c.seeds) < planned:
        text += f" Compared: {len(c.folds) * len(c.seeds)} of {planned} runs of each."
    if c.left_out:
        text += f" Left out: {_count(c.left_out, 'run')} of incomplete folds or seeds."
    if c.cases_left_out and len(c.seeds) < MIN_SEEDS:
        text += (
            f" Left out: {_count(c.cases_left_out, 'case')} with a {m.title} from one of the two only."
        )
    return text.strip()


def _reason(c: Comparison) -> str:
    """Return why the comparison of methods has no verdict."""
    d, m = c.difference, c.metric
    interval = f"{m.difference_text(d.bootstrap_low)} to {m.difference_text(d.bootstrap_high)}"
    if reason := withheld(c):
        return reason
    if _is_significant(c):
        return tabled(c)
    if c.p_holm < LEVEL:
        return f"the bootstrap interval over cases and seeds, {interval}, includes 0"
    if c.equivalence.equivalent >= PROBABLE and _table_differs(c):
        return tabled(c)
    if c.equivalence.equivalent >= PROBABLE:
        return f"the bootstrap interval over cases and seeds, {interval}, is not within the margin"
    return _NOT_SIGNIFICANT


def _spread(c: Comparison) -> str:
    sd = c.difference.deviation
    if not sd > 0:  # one training, or equal ones
        return " by as much"
    return f" (standard deviation between the pairs of trainings {sd:.2f} {c.metric.difference_unit})"


def _advice(c: Comparison) -> str:
    """Return what more seeds would bring, an empty text if they are not what is missing."""
    own = c.difference.seeds
    if withheld(c) or (own >= MIN_SEEDS and _reason(c) != _NOT_SIGNIFICANT):
        return ""
    seeds = seeds_for(c.difference, c.margin)
    margin = f"\u00b1{c.metric.amount(c.margin)}"
    if seeds == 0:
        start = "; start with 3" if own < MIN_SEEDS else ""
        return f"One pair of trainings does not say how many seeds a margin of {margin} needs{start}."
    if seeds is not None and seeds > own:
        number = max(seeds, MIN_SEEDS)
        return f"Given the variance seen, about {number} seeds would narrow the interval to {margin}."
    limit = math.ceil(100 * reach_with(c.difference, math.inf)) / 100
    remaining = f"\u00b1{limit:.2f} {c.metric.difference_unit}"
    if seeds is not None:
        return f"Given the variance seen, more seeds would narrow the interval to {remaining} at best."
    return (
        f"Given the variance seen, no number of seeds would narrow the interval to {margin}; "
        f"{remaining} remain."
    )


def _relation(p: float) -> str:
    """Return a p value with its sign: = or <."""
    text = p_number(p)
    return text if text.startswith("<") else f"= {text}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
