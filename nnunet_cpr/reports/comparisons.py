"""Comparisons of each trainer with the reference, on the runs that both have finished."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.reports.results import SETTING, Results, Setting, case_means, run_means
from nnunet_cpr.reports.selection import Selection, select_settings
from nnunet_cpr.reports.statistics import (
    Difference,
    Equivalence,
    compare,
    complete_folds,
    equivalence,
    non_inferiority,
    training_means,
)
from nnunet_cpr.studies.definition import TrainerEntry
from nnunet_cpr.studies.run_state import parse_trainer

_ROUNDING = 12
"""Decimals of a value that count; smaller differences come from the order of additions."""


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
        cases_left_out: number of cases with a value from one of the two only, in any seed.
        difference: statistics of other - reference, in the shown unit.
        tabled_difference: the same from the main table's means, which are over cases for each class
            and then over classes; it can have another sign where classes are missing in many cases.
        equivalence: posterior for other being better, equivalent or worse.
        p: the larger p of the corrected t-test and the test over folds and seeds.
        p_holm: p after Holm's correction over all comparisons of the report.
        advantage_low, p_non_inferior: lower limit of other's advantage, one-sided, and the p of the
            hypothesis that other is worse by the margin or more.
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
    cases_left_out: int
    margin: float
    difference: Difference
    tabled_difference: float
    equivalence: Equivalence
    p: float
    advantage_low: float
    p_non_inferior: float
    same_method: bool
    trained: tuple[dict[int, str], dict[int, str]]
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
    def tabled_gain(self) -> float:
        """Difference of the main table's means, positive if the other trainer is better."""
        return self.tabled_difference if self.metric.higher_is_better else -self.tabled_difference

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


def compare_with(
    results: Results, reference: TrainerEntry, selection: Selection | None
) -> list[Comparison]:
    """Return the comparisons of all other trainers with one of them, without verdicts.

    Args:
        results: results of a study.
        reference: one of its trainers, or of the selection's entries.
        selection: the selected settings, if these are to be compared.
    """
    entries = results.study.trainers if selection is None else selection.entries
    found = []
    for setting in results.settings:
        cases = results.of(results.cases if selection is None else selection.cases, setting)
        for name in results.study.metrics:
            values = _Values(cases, METRICS[name])
            found += [
                _compare(results, setting, METRICS[name], values, entry, reference, selection)
                for entry in entries
                if entry is not reference
            ]
    return found


def class_differences(results: Results, comparisons: Iterable[Comparison]) -> pd.DataFrame:
    """Return the differences of comparisons for each class, without correction for their number.

    Returns:
        One row for each comparison and class: the setting, metric, reference, trainer, class,
        cases_left_out, and difference, interval_low, interval_high in the shown unit of the metric.
        The interval is that of the corrected t-test, NaN with one training. cases_left_out is the
        number of cases with a value from one of the two only; then all three are NaN, as a difference
        without these cases would leave out false positives.
    """
    all_cases = select_settings(results).cases if results.study.select else results.cases
    rows: list[dict[str, object]] = []
    tables: dict[tuple[Setting, str], dict[str, _Values]] = {}
    for c in comparisons:
        key = (c.setting, c.metric.name)
        if key not in tables:
            cases = results.of(all_cases, c.setting)
            tables[key] = {
                str(name): _Values(of_class, c.metric)
                for name, of_class in cases.groupby("class", sort=False)
            }
        for name, values in tables[key].items():
            arrays, _, left_out = values.differences(c.entry, c.reference, c.folds, c.seeds)
            found = compare([] if left_out else arrays, results.ratios[c.setting.dataset], resamples=0)
            rows.append(
                {
                    **c.setting._asdict(),
                    "metric": c.metric.name,
                    "reference": c.reference.trainer,
                    "trainer": c.entry.trainer,
                    "class": name,
                    "cases_left_out": left_out,
                    "difference": found.mean,
                    "interval_low": found.low,
                    "interval_high": found.high,
                }
            )
    columns = [*SETTING, "metric", "reference", "trainer", "class", "cases_left_out"]
    return pd.DataFrame(rows, columns=[*columns, "difference", "interval_low", "interval_high"])


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
                "reference_mean": c.pairs["reference"].groupby("fold").mean().mean(),
                "trainer_mean": c.pairs["other"].groupby("fold").mean().mean(),
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
                "advantage_low": c.advantage_low,
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
    *("p_better", "p_equivalent", "p_worse", "advantage_low", "p_non_inferior"),
    *("sd_case", "sd_fold", "sd_seed", "sd_training", "sd_residual"),
    *("cases_better", "cases_worse", "sentence"),
]


# One comparison


class _Values:
    """Values of one metric in one setting, arranged for comparisons."""

    def __init__(self, cases: pd.DataFrame, metric: Metric) -> None:
        """Arrange the rows of :attr:`Results.cases` that belong to one setting."""
        self.scale = metric.scale
        means = case_means(cases, metric.name)
        self.tabled = run_means(cases, metric.name).set_index(["trainer", "fold", "seed"])[metric.name]
        self.wide = means.set_index(["fold", "case", "trainer", "seed"])[metric.name].unstack(
            ["trainer", "seed"]
        )
        self.runs: dict[str, set[tuple[int, int]]] = {}
        """Fold and seed of the runs in which some case has a value, by trainer."""
        runs = means.dropna(subset=[metric.name])[["trainer", "fold", "seed"]].drop_duplicates()
        for trainer, fold, seed in runs.itertuples(index=False, name=None):
            self.runs.setdefault(trainer, set()).add((fold, seed))

    def differences(
        self, entry: TrainerEntry, reference: TrainerEntry, folds: list[int], seeds: list[int]
    ) -> tuple[list[np.ndarray], pd.DataFrame, int]:
        """Return other - reference of each fold, [seeds, cases]; pairs of means; left-out cases."""
        rows = self.wide.index.get_level_values("fold").isin(folds)
        other, base = (
            np.round(
                self.scale * self.wide.loc[rows].reindex(columns=columns).to_numpy(float), _ROUNDING
            )
            for columns in (
                pd.MultiIndex.from_product([[each.trainer], seeds]) for each in (entry, reference)
            )
        )
        # A case without foreground in ground truth and prediction has no value.
        difference = np.round(other - base, _ROUNDING)
        defined = ~np.isnan(difference)
        present = defined.any(axis=1)
        index = self.wide.index[rows][present]
        pairs = pd.DataFrame(
            {
                name: np.nanmean(np.where(defined, values, np.nan)[present], axis=1).round(_ROUNDING)
                for name, values in (("reference", base), ("other", other))
            },
            index=index,
            dtype=float,
        )
        of_fold = index.get_level_values("fold")
        arrays = [difference[present][of_fold == fold].T for fold in folds]
        return arrays, pairs, int((np.isnan(other) != np.isnan(base)).any(axis=1).sum())


def _tabled_difference(
    values: _Values, entry: TrainerEntry, reference: TrainerEntry, runs: Sequence[tuple[int, int]]
) -> float:
    """Return the difference of the main table's means over the compared runs."""
    other, base = (
        values.tabled.reindex([(each.trainer, *run) for run in runs]).mean()
        for each in (entry, reference)
    )
    return float(values.scale * (other - base))


def _compare(
    results: Results,
    setting: Setting,
    metric: Metric,
    values: _Values,
    entry: TrainerEntry,
    reference: TrainerEntry,
    selection: Selection | None,
) -> Comparison:
    both = values.runs.get(reference.trainer, set()) & values.runs.get(entry.trainer, set())
    folds, seeds = results.largest_rectangle(both)
    arrays, pairs, cases_left_out = values.differences(entry, reference, folds, seeds)
    ratio = results.ratios[setting.dataset]
    difference = compare(arrays, ratio)
    trainings = training_means(complete_folds(arrays))
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
        cases_left_out=cases_left_out,
        margin=margin,
        difference=difference,
        tabled_difference=_tabled_difference(values, entry, reference, list(product(folds, seeds))),
        equivalence=equivalence(trainings.ravel(), ratio, margin),
        # Seeds of one method are no comparison of methods, so Holm's correction does not count them.
        p=math.nan if same else float(np.fmax(difference.p, difference.p_fold_seed)),
        advantage_low=low,
        p_non_inferior=p_non_inferior,
        same_method=same,
        trained=(
            _trainers(setting, reference, folds, selection),
            _trainers(setting, entry, folds, selection),
        ),
    )


def _trainers(
    setting: Setting, entry: TrainerEntry, folds: list[int], selection: Selection | None
) -> dict[int, str]:
    """Return the trainer of an entry in each fold."""
    if selection is None:
        return dict.fromkeys(folds, entry.trainer)
    return {fold: selection.trainer(setting, entry, fold) for fold in folds}


def _same_method(first: str, second: str) -> bool:
    """Return True if two names of our trainers differ in nothing but their seeds."""
    names = [parse_trainer(name) for name in (first, second)]
    if names[0] is None or names[1] is None:
        return False
    return replace(names[0], seed=None) == replace(names[1], seed=None)
