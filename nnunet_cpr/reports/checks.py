"""Checks of a study's runs that make a comparison doubtful."""

from __future__ import annotations

import math

import pandas as pd

from nnunet_cpr.reports.results import Results, Setting, class_means


def find_warnings(results: Results, setting: Setting) -> list[str]:
    """Return a line for each class with a Dice of 0 everywhere, missing run and diverged training.

    Args:
        results: results of a study.
        setting: data set, configuration and plans.
    """
    return [
        *_classes_of_zero(results, setting),
        *_missing_runs(results, setting),
        *_diverged_trainings(results, setting),
    ]


def _classes_of_zero(results: Results, setting: Setting) -> list[str]:
    means = class_means(results.of(results.cases, setting))
    lines = []
    for entry in results.study.trainers:
        mine = means[(means["trainer"] == entry.trainer) & means["dice"].notna()]
        for name, rows in mine.groupby("class", sort=False):
            zero = rows[rows["dice"] == 0]
            if zero.empty:
                continue
            where = "all runs"
            if len(zero) < len(rows):
                runs = zip(zero["fold"], zero["seed"])
                where = "; ".join(
                    results.run(setting, fold, entry.trainer, seed).fold_and_seed for fold, seed in runs
                )
            lines.append(f"{entry.full_title}: Dice of 0 in all cases of class {name} ({where}).")
    return lines


def _missing_runs(results: Results, setting: Setting) -> list[str]:
    planned = len(results.study.folds) * len(results.seeds)
    lines = []
    for entry in results.study.trainers:
        finished = len(results.finished_runs(setting, entry.trainer))
        if finished < planned:
            lines.append(f"{entry.full_title}: {finished} of {planned} runs have finished.")
    return lines


def _diverged_trainings(results: Results, setting: Setting) -> list[str]:
    """Return a line for each training whose loss is not finite or ends above its start."""
    epochs = results.of(results.epochs, setting)
    lines = []
    for (trainer, fold, seed), rows in epochs.groupby(["trainer", "fold", "seed"], sort=False):
        reason = _divergence(rows)
        if reason:
            title = results.study.entry(str(trainer)).full_title
            run = results.run(setting, fold, str(trainer), seed)
            lines.append(f"{title}, {run.fold_and_seed}: the training diverged ({reason}).")
    return lines


def _divergence(rows: pd.DataFrame) -> str:
    finished = rows.dropna(subset=["seconds"]).sort_values("epoch")  # the last may be running
    if finished.empty:
        return ""
    losses = finished["train_loss"].astype(float)
    if math.isnan(losses.iloc[-1]):
        return "its loss is not a number"
    if len(losses) >= 5 and losses.iloc[-max(1, len(losses) // 10) :].mean() > losses.iloc[0]:
        return "its loss ends above that of its first epoch"
    return ""
