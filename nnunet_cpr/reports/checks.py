"""Checks of a study's runs that make a comparison doubtful."""

from __future__ import annotations

import math

from nnunet_cpr.reports.results import Results, class_means


def find_warnings(part: Results) -> list[str]:
    """Return one line for each class with Dice 0 in all cases, missing run and diverged training.

    Args:
        part: results of one setting.
    """
    return [
        *_classes_of_zero(part),
        *_unset_bounds(part),
        *_missing_runs(part),
        *_diverged_trainings(part),
    ]


def _classes_of_zero(part: Results) -> list[str]:
    means = class_means(part.cases).dropna(subset=["dice"])
    lines = []
    for (trainer, name), rows in means.groupby(["trainer", "class"], sort=False):
        zero = rows[rows["dice"] == 0]
        runs = [part.run(*run).fold_and_seed for run in zero[["fold", "trainer", "seed"]].values]
        where = "all runs" if len(zero) == len(rows) else "; ".join(runs)
        title = part.study.entry(str(trainer)).full_title
        lines += [f"{title}: Dice of 0 in all cases of class {name} ({where})."] if runs else []
    return lines


def _unset_bounds(part: Results) -> list[str]:
    return [
        f"{part.study.entry(run.entry).full_title}, {run.fold_and_seed}: the bounds of CPR were never "
        "set, so nothing was regularized."
        for run in part.unbounded
    ]


def _missing_runs(part: Results) -> list[str]:
    planned, lines = part.planned_runs, []
    for entry in part.study.trainers:
        count = len(part.finished_runs(entry.trainer))
        lines += [f"{entry.full_title}: {count} of {planned} runs have finished."] * (count < planned)
    return lines


def _diverged_trainings(part: Results) -> list[str]:
    """Return a line for each training whose loss is not finite or ends above its start."""
    epochs = part.epochs.dropna(subset=["seconds"])  # one may be running
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
        title = part.study.entry(str(trainer)).full_title
        run = part.run(fold, str(trainer), seed)
        lines.append(f"{title}, {run.fold_and_seed}: the training diverged ({reason}).")
    return lines
