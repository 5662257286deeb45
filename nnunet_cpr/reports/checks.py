"""Checks of a study's runs that make a comparison doubtful."""

from __future__ import annotations

import math

from nnunet_cpr.reports.results import Results, Setting, class_means


def find_warnings(results: Results, setting: Setting) -> list[str]:
    """Return one line for each class with Dice 0 in all cases, missing run and diverged training.

    Args:
        results: results of a study.
        setting: data set, configuration and plans.
    """
    return [
        *_classes_of_zero(results, setting),
        *_unset_bounds(results, setting),
        *_missing_runs(results, setting),
        *_diverged_trainings(results, setting),
    ]


def _classes_of_zero(results: Results, setting: Setting) -> list[str]:
    means = class_means(results.rows_for(results.cases, setting)).dropna(subset=["dice"])
    lines = []
    for (trainer, name), rows in means.groupby(["trainer", "class"], sort=False):
        zero = rows[rows["dice"] == 0]
        runs = [
            results.run(setting, *run).fold_and_seed for run in zero[["fold", "trainer", "seed"]].values
        ]
        where = "all runs" if len(zero) == len(rows) else "; ".join(runs)
        title = results.study.entry(str(trainer)).full_title
        lines += [f"{title}: Dice of 0 in all cases of class {name} ({where})."] if runs else []
    return lines


def _unset_bounds(results: Results, setting: Setting) -> list[str]:
    return [
        f"{results.study.entry(run.entry).full_title}, {run.fold_and_seed}: the bounds of CPR were "
        "never set, so nothing was regularized."
        for of_setting, run in results.unbounded
        if of_setting == setting
    ]


def _missing_runs(results: Results, setting: Setting) -> list[str]:
    planned, lines = results.planned_runs, []
    for entry in results.study.trainers:
        count = len(results.finished_runs(setting, entry.trainer))
        lines += [f"{entry.full_title}: {count} of {planned} runs have finished."] * (count < planned)
    return lines


def _diverged_trainings(results: Results, setting: Setting) -> list[str]:
    """Return a line for each training whose loss is not finite or ends above its start."""
    epochs = results.rows_for(results.epochs, setting).dropna(subset=["seconds"])  # one may be running
    lines = []
    for (trainer, fold, seed), rows in epochs.groupby(["trainer", "fold", "seed"], sort=False):
        losses = rows.sort_values("epoch")["train_loss"].astype(float)
        end = losses.iloc[-max(1, len(losses) // 10) :].mean()
        if math.isnan(losses.iloc[-1]):
            reason = "its loss is not a number"
        elif len(losses) >= 5 and end > losses.iloc[0]:
            reason = "its loss ends above that of its first epoch"
        else:
            continue
        title = results.study.entry(str(trainer)).full_title
        run = results.run(setting, fold, str(trainer), seed)
        lines.append(f"{title}, {run.fold_and_seed}: the training diverged ({reason}).")
    return lines
