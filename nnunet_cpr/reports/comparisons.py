"""Comparisons of each trainer with the reference, on the runs that both have finished."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations

import numpy as np
import pandas as pd

from nnunet_cpr.names import WrongName
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.reports.results import RUN, SETTING, Results, Setting, case_means
from nnunet_cpr.reports.selection import Selection, select_settings
from nnunet_cpr.reports.statistics import (
    LEVEL,
    MIN_SEEDS,
    Difference,
    Equivalence,
    compare,
    equivalence,
    holm,
    non_inferiority,
    p_number,
    seeds_for,
)
from nnunet_cpr.studies.definition import TrainerEntry

CAVEAT = (
    "A verdict is about methods and needs at least 3 seeds. With fewer seeds the numbers describe these "
    "trainings only: another training of the same method can differ by more."
)
PROBABLE = 0.95
"""Probability from which two methods are called equivalent."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one trainer with the reference, by one metric in one setting.

    Attributes:
        entry, reference: the two trainers, or the selected settings of two methods.
        folds, seeds: folds and seeds of the runs that are compared.
        pairs: indexed by (fold, case): columns reference and other, the mean over the seeds, in the
            shown unit of the metric.
        left_out: number of runs that both have finished, but that are not compared since other runs
            of their fold or seed are missing.
        difference: statistics of other - reference, in the shown unit.
        equivalence: posterior for other being better, equivalent or worse.
        p: the larger p of the corrected t-test and the test over folds and seeds.
        p_holm: p after Holm's correction over all comparisons of the report.
        non_inferior_low, p_non_inferior: lower limit of other's advantage, one-sided, and the p of
            the hypothesis that other is worse by the margin or more.
        verdict: ``better``, ``worse``, ``equivalent`` or ``undecided``.
        sentence: the result in words.
        same_method: True if the two differ in nothing but the seed in their names.
        trained: trainers of the reference and of the other, by fold.
    """

    setting: Setting
    metric: Metric
    entry: TrainerEntry
    reference: TrainerEntry
    folds: list[int]
    seeds: list[int]
    pairs: pd.DataFrame
    left_out: int
    margin: float
    difference: Difference
    equivalence: Equivalence
    p: float
    non_inferior_low: float
    p_non_inferior: float
    same_method: bool
    trained: tuple[dict[int, str], dict[int, str]] = field(default_factory=lambda: ({}, {}))
    p_holm: float = math.nan
    verdict: str = "undecided"
    sentence: str = ""

    @property
    def anchor(self) -> str:
        """Unique name on a page."""
        return "-".join([*self.setting, self.entry.trainer, self.metric.name])

    @property
    def gain(self) -> float:
        """Mean difference, positive if the other trainer is better."""
        return self.difference.mean if self.metric.higher_is_better else -self.difference.mean

    @property
    def wins(self) -> int:
        """Number of cases in which the other trainer is better."""
        sign = 1 if self.metric.higher_is_better else -1
        return int((sign * (self.pairs["other"] - self.pairs["reference"]) > 0).sum())

    @property
    def losses(self) -> int:
        """Number of cases in which the other trainer is worse."""
        ties = int((self.pairs["other"] == self.pairs["reference"]).sum())
        return len(self.pairs) - self.wins - ties

    @property
    def non_inferior(self) -> bool:
        """True if the other trainer is shown not to be worse by more than the margin."""
        return len(self.seeds) >= MIN_SEEDS and self.p_non_inferior < LEVEL


def compare_all(results: Results) -> list[Comparison]:
    """Return all comparisons in the study's order, with verdicts after Holm's correction over them."""
    study = results.study
    selection = select_settings(results) if study.select else None
    entries = study.trainers if selection is None else selection.entries
    reference = study.entry(study.reference) if selection is None else selection.reference
    found = [
        _compare(results, setting, METRICS[name], entry, reference, selection)
        for setting in results.settings
        for name in study.metrics
        for entry in entries
        if entry is not reference
    ]
    return [
        _with_verdict(results, replace(comparison, p_holm=p))
        for comparison, p in zip(found, holm([comparison.p for comparison in found]))
    ]


def non_inferiority_comparisons(results: Results, comparisons: list[Comparison]) -> list[Comparison]:
    """Return the comparisons with ``non_inferior_to``, those given if it is the reference."""
    study = results.study
    if study.non_inferior_to == study.reference:
        return comparisons
    selection = select_settings(results) if study.select else None
    entries = study.trainers if selection is None else selection.entries
    named = study.entry(study.non_inferior_to) if selection is None else selection.non_inferior_to
    return [
        _compare(results, setting, METRICS[name], entry, named, selection)
        for setting in results.settings
        for name in study.metrics
        for entry in entries
        if entry is not named
    ]


def compare_classes(results: Results, comparison: Comparison) -> pd.DataFrame:
    """Return the differences of a comparison for each class, without correction for their number.

    Returns:
        Columns class, difference, low, high in the shown unit of the metric; the interval is that of
        the corrected t-test, NaN with one training.
    """
    cases = results.of(results.cases, comparison.setting)
    if results.study.select:
        cases = results.of(select_settings(results).cases, comparison.setting)
    rows = []
    for name in dict.fromkeys(cases["class"]):
        arrays, _ = _arrays(
            cases[cases["class"] == name],
            comparison.metric,
            comparison.entry,
            comparison.reference,
            comparison.folds,
            comparison.seeds,
        )
        found = compare(arrays, results.ratios[comparison.setting.dataset], resamples=0)
        rows.append({"class": name, "difference": found.mean, "low": found.low, "high": found.high})
    return pd.DataFrame(rows, columns=["class", "difference", "low", "high"])


def comparison_table(comparisons: Iterable[Comparison]) -> pd.DataFrame:
    """Return ``comparisons.csv``: one row for each comparison and metric.

    ``difference`` is other - reference in ``unit``; ``p_better`` and ``verdict`` are about the trainer,
    so a negative difference of HD95 is better.
    """
    rows = []
    for c in comparisons:
        d = c.difference
        rows.append(
            {
                **c.setting._asdict(),
                "metric": c.metric.name,
                "unit": c.metric.difference_unit,
                "reference": c.reference.trainer,
                "trainer": c.entry.trainer,
                "verdict": c.verdict,
                "folds": " ".join(map(str, c.folds)),
                "seeds": " ".join(str(seed) for seed in c.seeds if seed >= 0),
                "trainings": d.folds * d.seeds,
                "cases": d.cases,
                "reference_mean": c.pairs["reference"].mean(),
                "trainer_mean": c.pairs["other"].mean(),
                "difference": d.mean,
                "interval_low": d.low,
                "interval_high": d.high,
                "bootstrap_low": d.bootstrap_low,
                "bootstrap_high": d.bootstrap_high,
                "p_corrected_t": d.p,
                "p_fold_seed": d.p_fold_seed,
                "p": c.p,
                "p_holm": c.p_holm,
                "margin": c.margin,
                **{f"p_{name}": value for name, value in asdict(c.equivalence).items()},
                "non_inferior_low": c.non_inferior_low,
                "p_non_inferior": c.p_non_inferior,
                **{f"sd_{source}": value for source, value in asdict(d.components).items()},
                "cases_better": c.wins,
                "cases_worse": c.losses,
                "sentence": c.sentence,
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = [
    *SETTING,
    *("metric", "unit", "reference", "trainer", "verdict", "folds", "seeds", "trainings", "cases"),
    *("reference_mean", "trainer_mean", "difference", "interval_low", "interval_high"),
    *("bootstrap_low", "bootstrap_high", "p_corrected_t", "p_fold_seed", "p", "p_holm", "margin"),
    *("p_better", "p_equivalent", "p_worse", "non_inferior_low", "p_non_inferior"),
    *("sd_case", "sd_fold", "sd_seed", "sd_training", "sd_residual"),
    *("cases_better", "cases_worse", "sentence"),
]


# One comparison


def _compare(
    results: Results,
    setting: Setting,
    metric: Metric,
    entry: TrainerEntry,
    reference: TrainerEntry,
    selection: Selection | None,
) -> Comparison:
    cases = results.of(results.cases if selection is None else selection.cases, setting)
    runs = [
        {(run.fold, run.seed) for run in rows.itertuples()}
        for rows in (
            cases.loc[cases["trainer"] == each.trainer, RUN].drop_duplicates()
            for each in (reference, entry)
        )
    ]
    both = runs[0] & runs[1]
    folds, seeds = _largest_rectangle(both, results)
    arrays, pairs = _arrays(case_means(cases, metric.name), metric, entry, reference, folds, seeds)
    ratio = results.ratios[setting.dataset]
    difference = compare(arrays, ratio)
    trainings = (
        np.array([np.nanmean(array, axis=1) for array in arrays]).ravel()
        if difference.folds
        else np.array([])
    )
    if not metric.higher_is_better:
        trainings = -trainings
    margin = results.study.margin[metric.name]
    same = _same_method(entry.trainer, reference.trainer)
    low, p_non_inferior = non_inferiority(trainings, ratio, margin)
    return Comparison(
        setting=setting,
        metric=metric,
        entry=entry,
        reference=reference,
        folds=folds,
        seeds=seeds,
        pairs=pairs,
        left_out=len(both) - len(folds) * len(seeds),
        margin=margin,
        difference=difference,
        equivalence=equivalence(trainings, ratio, margin),
        # Seeds of one method are no comparison of methods, so Holm's correction does not count them.
        p=math.nan if same else float(np.fmax(difference.p, difference.p_fold_seed)),
        non_inferior_low=low,
        p_non_inferior=p_non_inferior,
        same_method=same,
        trained=tuple(  # type: ignore[arg-type]
            {
                fold: each.trainer if selection is None else selection.trainer(setting, each, fold)
                for fold in folds
            }
            for each in (reference, entry)
        ),
    )


def _largest_rectangle(runs: set[tuple[int, int]], results: Results) -> tuple[list[int], list[int]]:
    """Return folds and seeds all of whose runs are in a set, as many runs as possible."""
    best: tuple[list[int], list[int]] = ([], [])
    # With many seeds only the sets of those that finished the most folds.
    by_count = sorted(results.seeds, key=lambda seed: -sum(run[1] == seed for run in runs))
    many = len(by_count) > 8
    for count in range(1, len(by_count) + 1):
        for seeds in [tuple(by_count[:count])] if many else combinations(results.seeds, count):
            folds = [f for f in results.study.folds if all((f, seed) in runs for seed in seeds)]
            if folds and len(folds) * count >= len(best[0]) * len(best[1]):
                best = (folds, [seed for seed in results.seeds if seed in seeds])
    return best


def _arrays(
    values: pd.DataFrame,
    metric: Metric,
    entry: TrainerEntry,
    reference: TrainerEntry,
    folds: list[int],
    seeds: list[int],
) -> tuple[list[np.ndarray], pd.DataFrame]:
    """Return the differences of each fold, [seeds, cases], and the means over the seeds."""
    arrays, parts = [], []
    for fold in folds:
        of_fold = values[values["fold"] == fold]
        other, base = (
            metric.scale
            * of_fold[of_fold["trainer"] == each.trainer]
            .pivot(index="seed", columns="case", values=metric.name)
            .reindex(seeds)
            .astype(float)
            for each in (entry, reference)
        )
        # A case without foreground in ground truth and prediction has no value.
        cases = sorted(set(other.columns) & set(base.columns))
        difference = other[cases] - base[cases]
        present = difference.columns[difference.notna().any()]
        arrays.append(difference[present].to_numpy())
        defined = difference[present].notna()
        parts.append(
            pd.DataFrame(
                {
                    "reference": base[present].where(defined).mean(),
                    "other": other[present].where(defined).mean(),
                },
                index=pd.Index(present, name="case"),
            )
        )
    if not parts:
        index = pd.MultiIndex.from_arrays([[], []], names=["fold", "case"])
        return [], pd.DataFrame(columns=["reference", "other"], index=index, dtype=float)
    return arrays, pd.concat(dict(zip(folds, parts)), names=["fold", "case"])


def _same_method(first: str, second: str) -> bool:
    """Return True if two names of our trainers differ in nothing but their seeds."""
    try:
        names = [parse_trainer_name(name) for name in (first, second)]
    except WrongName:
        return False
    if names[0] is None or names[1] is None:
        return False
    return replace(names[0], seed=None) == replace(names[1], seed=None)


# Verdict and sentence


def _with_verdict(results: Results, c: Comparison) -> Comparison:
    d = c.difference
    within = -c.margin < d.bootstrap_low and d.bootstrap_high < c.margin
    verdict = "undecided"
    if len(c.seeds) < MIN_SEEDS or c.same_method or not d.folds:
        pass
    elif c.equivalence.equivalent >= PROBABLE and within:
        verdict = "equivalent"
    elif _is_significant(c):
        verdict = "better" if c.gain > 0 else "worse"
    c = replace(c, verdict=verdict)
    return replace(c, sentence=_sentence(results, c))


def _is_significant(c: Comparison) -> bool:
    return c.p_holm < LEVEL and c.difference.has_bootstrap_interval_without_zero


def _sentence(results: Results, c: Comparison) -> str:
    d, m = c.difference, c.metric
    names = f"{c.entry.full_title} and {c.reference.full_title}"
    if not d.folds:
        return (
            f"{names} cannot be compared by {m.title}: expected a run that both have finished, got none."
        )
    amount = f"{m.difference_text(d.mean)} {m.difference_unit}"
    sample = f"{_count(d.folds, 'fold')}, {_count(max(d.seeds, 1), 'seed')}, {_count(d.cases, 'case')}"
    what = "of Dice" if m.name == "dice" and m.difference_unit == "points" else f"of {m.title}"
    margin = f"\u00b1{c.margin:g} {m.difference_unit}"
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
            f"p {_p(c.p_holm)} after Holm's correction, {sample})"
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
            text = (
                f"Undecided between {names}: the difference is not statistically significant, "
                f"{numbers}; it is within {margin} with probability {c.equivalence.equivalent:.2f}. "
                f"{_advice(c)}"
            )
    planned = len(results.study.folds) * len(results.seeds)
    if d.folds * d.seeds < planned:
        text += f" So far {d.folds * d.seeds} of {planned} runs of each."
    if c.left_out:
        text += f" Left out: {_count(c.left_out, 'run')} of incomplete folds or seeds."
    return text.strip()


def _spread(c: Comparison) -> str:
    sd = c.difference.components.training
    if math.isnan(sd):
        return " by as much"
    return (
        f" (standard deviation between pairs of trainings {sd:.2f} {c.metric.difference_unit}, "
        "estimated from the folds)"
    )


def _advice(c: Comparison) -> str:
    seeds = seeds_for(c.difference, c.margin)
    margin = f"\u00b1{c.margin:g} {c.metric.difference_unit}"
    if seeds == 0:
        return f"The variance seen does not say how many seeds would resolve {margin}; start with 3."
    if seeds is None:
        return (
            f"No number of seeds would resolve {margin} on these cases and folds, given the variance "
            "seen; it takes more folds or cases, or a wider margin."
        )
    return f"Given the variance seen, about {seeds} seeds would resolve {margin}."


def _p(p: float) -> str:
    text = p_number(p)
    return text if text.startswith("<") else f"= {text}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
