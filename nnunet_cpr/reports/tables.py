"""Tables of the report.

:func:`main_table` is a tidy data frame (``table.csv``); the others are
:class:`~nnunet_cpr.reports.renderers.Table` for a renderer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, product

import pandas as pd

from nnunet_cpr.reports.metrics import METRICS, Metric
from nnunet_cpr.reports.renderers import Line, Table, Value
from nnunet_cpr.reports.results import (
    SETTING,
    Results,
    Setting,
    case_means,
    class_means,
    in_order,
    run_means,
)
from nnunet_cpr.reports.selection import selection_notes
from nnunet_cpr.studies.definition import TrainerEntry

OWN, COMMON, PUBLISHED = "own folds", "common folds", "published"


def metrics_of(results: Results) -> list[Metric]:
    """Return the metrics of the study's tables."""
    return [METRICS[name] for name in results.study.metrics]


def main_table(results: Results) -> pd.DataFrame:
    """Return ``table.csv``: the foreground mean of every trainer in every setting.

    Returns:
        One row for each setting, kind and trainer. ``kind`` is "own folds" (all runs that the trainer
        has finished), "common folds" (finished by all trainers with any results; only if trainers
        differ in their folds), or "published" (of the data set; configuration and plans are empty).
        For each metric there is the mean over runs (``dice_percent``), the standard deviation (n - 1)
        of the folds' means over seeds (``deviation_folds_points``) and of the seeds' means over folds
        (``deviation_seeds_points``), and ``best``, which marks the best value of a column with the
        same runs and cases. The columns of other metrics than Dice start with their name.
    """
    study = results.study
    metrics = metrics_of(results)
    means = {
        metric.name: run_means(results.cases, metric.name)
        for metric in metrics
        if metric.name in results.cases
    }
    rows: list[dict[str, object]] = []

    def add(setting: Setting, kind: str, runs: dict[str, list[tuple[int, int]]]) -> None:
        for entry in study.trainers:
            wanted = runs[entry.trainer]
            numbers: dict[str, float] = {}
            same: dict[str, str | None] = {}
            for metric in metrics:
                values = pd.Series(dtype=float)
                if metric.name in means:
                    of_setting = results.of(means[metric.name], setting)
                    mine = of_setting[of_setting["trainer"] == entry.trainer]
                    by_run = metric.scale * mine.set_index(["fold", "seed"])[metric.name].astype(float)
                    values = by_run[by_run.index.isin(wanted)]
                numbers |= _numbers(metric, values)
                missing = _without_value(results, setting, entry.trainer, metric, wanted)
                same[_key(metric, "same")] = str((sorted(wanted), missing)) if wanted else None
            rows.append(
                {
                    **setting._asdict(),
                    "kind": kind,
                    "group": entry.group,
                    "label": entry.title,
                    "trainer": entry.trainer,
                    **numbers,
                    "folds": " ".join(map(str, _complete(results, wanted))),
                    "folds_planned": len(study.folds),
                    "runs": len(wanted),
                    "runs_planned": len(study.folds) * len(results.seeds),
                    **same,
                }
            )

    for dataset, settings in groupby(results.settings, key=lambda s: s.dataset):
        for setting in settings:
            trainers = [entry.trainer for entry in study.trainers]
            runs = {trainer: results.finished_runs(setting, trainer) for trainer in trainers}
            add(setting, OWN, runs)
            common = common_folds({t: results.finished(setting, t) for t in trainers if runs[t]})
            both = [run for run in product(common, results.seeds)]
            if common and any(r and r != both for r in runs.values()):
                add(setting, COMMON, {t: both if r else [] for t, r in runs.items()})
        if any(dataset in entry.published for entry in study.trainers):
            for entry in study.trainers:
                numbers = {key: math.nan for metric in metrics for key in _numbers(metric, pd.Series())}
                rows.append(
                    {
                        **Setting(dataset, "", "")._asdict(),
                        "kind": PUBLISHED,
                        "group": entry.group,
                        "label": entry.title,
                        "trainer": entry.trainer,
                        **numbers,
                        METRICS["dice"].column: entry.published.get(dataset, math.nan),
                        **dict.fromkeys(("folds", "folds_planned", "runs", "runs_planned"), ""),
                        **dict.fromkeys(_key(metric, "same") for metric in metrics),
                    }
                )
    table = pd.DataFrame(rows)
    for metric in metrics:
        table[_key(metric, "best")] = _best(table, metric)
    return table.drop(columns=[_key(metric, "same") for metric in metrics])


def _key(metric: Metric, name: str) -> str:
    return name if metric.name == "dice" else f"{metric.name}_{name}"


def _numbers(metric: Metric, values: pd.Series) -> dict[str, float]:
    """Return mean and standard deviations of the runs, whose index is (fold, seed)."""
    names = {name: _key(metric, f"deviation_{name}_{metric.difference_unit}") for name in _DEVIATIONS}
    if values.empty:
        return {metric.column: math.nan, **dict.fromkeys(names.values(), math.nan)}
    return {
        metric.column: float(values.mean()),
        **{key: float(values.groupby(_DEVIATIONS[n]).mean().std(ddof=1)) for n, key in names.items()},
    }


_DEVIATIONS = {"folds": "fold", "seeds": "seed"}


def _complete(results: Results, runs: Sequence[tuple[int, int]]) -> list[int]:
    return [f for f in results.study.folds if all((f, seed) in runs for seed in results.seeds)]


def _without_value(
    results: Results, setting: Setting, trainer: str, metric: Metric, runs: list[tuple[int, int]]
) -> list[tuple[object, ...]]:
    """Return fold, seed, case and class where the metric has no value, but the Dice has."""
    if metric.name == "dice" or metric.name not in results.cases:
        return []
    cases = results.of(results.cases, setting)
    cases = cases[(cases["trainer"] == trainer) & cases["dice"].notna() & cases[metric.name].isna()]
    index = cases.set_index(["fold", "seed", "case", "class"]).index
    return sorted(key for key in index if key[:2] in runs)


def _best(table: pd.DataFrame, metric: Metric) -> pd.Series:
    # Values that are equal in the table's decimals are equally good.
    shown = table[metric.column].round(metric.decimals)
    column = [table[name] for name in (*SETTING, "kind")]
    same = table[_key(metric, "same")].groupby(column, sort=False).transform("nunique") <= 1
    several = shown.groupby(column, sort=False).transform("count") > 1
    best = shown.groupby(column, sort=False).transform("max" if metric.higher_is_better else "min")
    return same & several & (shown == best)


def common_folds(folds: dict[str, list[int]]) -> list[int]:
    """Return the folds that are in all of the lists."""
    lists = list(folds.values())
    return [fold for fold in lists[0] if all(fold in f for f in lists)] if lists else []


def layout(results: Results, table: pd.DataFrame) -> Table:
    """Return the main table: trainers down in their groups, settings and metrics across."""
    study = results.study
    columns: list[tuple[str, str, list[Value]]] = []
    for (*parts, kind), rows in table.groupby([*SETTING, "kind"], sort=False):
        setting = Setting(*parts)
        for metric in metrics_of(results):
            if kind == PUBLISHED and metric.name != "dice":
                continue
            title = metric.heading
            if kind == COMMON:
                title += f", common folds ({rows['folds'].max()})"
            elif kind == PUBLISHED:
                title = f"published {metric.heading}"
            heading = setting.dataset if kind == PUBLISHED else results.title(setting)
            values = [_value(results, metric, kind, row) for _, row in rows.iterrows()]
            columns.append((heading, title, values))
    lines = tuple(
        Line(entry.title, tuple(values[position] for _, _, values in columns), entry.group)
        for position, entry in enumerate(study.trainers)
    )
    groups = tuple((h, len(list(of_group))) for h, of_group in groupby(h for h, _, _ in columns))
    titles = tuple(title for _, title, _ in columns)
    if set(titles) == {METRICS["dice"].heading}:  # the data sets alone are clear
        return Table("trainer", tuple(heading for heading, _, _ in columns), lines)
    return Table("trainer", titles, lines, groups)


def _value(results: Results, metric: Metric, kind: str, row: pd.Series) -> Value:
    below = []
    seeded = len(results.study.seeds) > 0
    for name in _DEVIATIONS:
        deviation = row[_key(metric, f"deviation_{name}_{metric.difference_unit}")]
        if not math.isnan(deviation):
            below.append(f"± {metric.text(deviation)}" + (f" over {name}" if seeded else ""))
    if kind == OWN and row["runs"] < row["runs_planned"]:
        below.append(f"{row['runs']} of {row['runs_planned']} {'runs' if seeded else 'folds'}")
    return Value(metric.text(row[metric.column]), tuple(below), bool(row[_key(metric, "best")]))


def layout_notes(results: Results) -> list[str]:
    """Return the notes of the main table."""
    study = results.study
    folds, seeds = len(study.folds), len(results.seeds)
    metrics = metrics_of(results)
    names = " and ".join(metric.heading for metric in metrics)
    note = f"Foreground mean of {names} over {'folds and seeds' if study.seeds else 'folds'}"
    sources = [name for name, number in (("folds", folds), ("seeds", seeds)) if number > 1]
    if sources:
        note += " ± standard deviation (n - 1) over " + " and over ".join(sources)
    if len(sources) == 2:
        note += ": that of the folds' means over seeds, and of the seeds' means over folds"
    note += ". The best value of a column is bold."
    if any(not metric.higher_is_better for metric in metrics):
        note += " Lower is better for " + ", ".join(
            metric.title for metric in metrics if not metric.higher_is_better
        )
        note += "."
    notes = [note]
    if any(d in entry.published for entry in study.trainers for d in study.datasets):
        notes.append(f"Published numbers: {study.source or 'source not given'}.")
    if any(
        len(results.finished_runs(setting, entry.trainer)) < folds * seeds
        for setting in results.settings
        for entry in study.trainers
    ):
        what = "runs" if study.seeds else "folds"
        notes.append(
            f"Not all {what} have finished; the number of {what} is below the mean. Means over "
            f"different {what} cannot be compared: only columns with the same {what} have a best value."
        )
    return [*notes, *selection_notes(results)]


def class_table(results: Results, setting: Setting, metric: Metric = METRICS["dice"]) -> Table | None:
    """Return the mean of each class over the trainer's finished runs, trainers down, classes across."""
    if metric.name not in results.cases:
        return None
    means = results.of(class_means(results.cases, metric.name), setting)
    if means.empty:
        return None
    values = means.groupby(["trainer", "class"], sort=False)[metric.name].mean() * metric.scale
    classes = in_order(means["class"])
    entries = [e for e in results.study.trainers if results.finished_runs(setting, e.trainer)]
    return Table(
        "trainer",
        tuple(classes),
        tuple(
            Line(
                entry.title,
                tuple(
                    Value(metric.text(values.get((entry.trainer, each), math.nan))) for each in classes
                ),
                entry.group,
            )
            for entry in entries
        ),
    )


def case_table(
    results: Results,
    setting: Setting,
    metric: Metric = METRICS["dice"],
    entries: Sequence[TrainerEntry] | None = None,
) -> Table | None:
    """Return the foreground mean of each case over the seeds, cases down, trainers across.

    Args:
        results: results of a study.
        setting: data set, configuration and plans.
        metric: the metric.
        entries: the trainers; all if None.
    """
    if metric.name not in results.cases:
        return None
    means = results.of(case_means(results.cases, metric.name), setting)
    shown = [
        entry
        for entry in (results.study.trainers if entries is None else entries)
        if results.finished_runs(setting, entry.trainer)
    ]
    means = means[means["trainer"].isin([entry.trainer for entry in shown])]
    if means.empty:
        return None
    by_case = means.pivot_table(
        index=["fold", "case"], columns="trainer", values=metric.name, dropna=False, observed=True
    )
    present = means[["fold", "case"]].drop_duplicates().sort_values(["fold", "case"])
    by_case = metric.scale * by_case.reindex(pd.MultiIndex.from_frame(present))
    by_case = by_case.reindex(columns=[entry.trainer for entry in shown])
    return Table(
        "case",
        ("fold", *(entry.full_title for entry in shown)),
        tuple(
            Line(str(case), (Value(str(fold)), *(Value(metric.text(value)) for value in values)))
            for (fold, case), values in zip(by_case.index, by_case.to_numpy(float))
        ),
    )


def time_table(results: Results, setting: Setting) -> Table:
    """Return the times of epochs and runs, and the peak memory, of each trainer."""
    epochs = results.of(results.epochs, setting)
    resources = results.of(results.resources, setting)
    lines = []
    for entry in results.study.trainers:
        finished = results.finished_runs(setting, entry.trainer)
        mine = epochs[epochs["trainer"] == entry.trainer]
        sums = mine.groupby(["fold", "seed"])["seconds"].sum(min_count=1)
        whole = sums[sums.index.isin(finished)]
        measured = resources[resources["trainer"] == entry.trainer]
        with_validation = measured.set_index(["fold", "seed"])["seconds"]
        with_validation = with_validation[with_validation.index.isin(finished)]
        lines.append(
            Line(
                entry.full_title,
                (
                    Value(_recorded(mine["seconds"].median(), "{:.1f} s")),
                    Value(_duration(whole.mean())),
                    Value(_duration(with_validation.mean())),
                    Value(_recorded(measured["peak_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                    Value(_recorded(measured["peak_gpu_memory_bytes"].max() / 2**30, "{:.1f} GiB")),
                ),
            )
        )
    columns = ("epoch (median)", "training of a fold", "with validation", "memory", "GPU memory")
    return Table("trainer", columns, tuple(lines))


def _recorded(value: float, form: str) -> str:
    return "not recorded" if math.isnan(value) else form.format(value)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "not recorded"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
