"""Checks of a study's runs that make a comparison doubtful."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nnunet_cpr.reports.results import SettingResults, class_means
from nnunet_cpr.studies.run_state import planned_epochs


def find_warnings(results: SettingResults) -> list[str]:
    """Return one line for each class with Dice 0 in all cases, missing, short and diverged training."""
    titles = {entry.key: entry.full_title for entry in results.study.trainers}
    counts = {trainer: len(results.finished_runs(trainer)) for trainer in titles}
    return [
        *_classes_of_zero(results, titles),
        *(f"{titles[run.entry]}, {run.fold_and_seed}: {text}." for run, text, _ in results.flaws),
        *(
            f"{titles[trainer]}: {count} of {results.planned_runs} runs finished."
            for trainer, count in counts.items()
            if count < results.planned_runs
        ),
        *_short_trainings(results, titles),
        *_diverged_trainings(results, titles),
    ]


def _classes_of_zero(results: SettingResults, titles: dict[str, str]) -> Iterator[str]:
    means = class_means(results.cases).dropna(subset=["dice"])
    for (trainer, name), rows in means.groupby(["trainer", "class"], sort=False):
        zero = rows.loc[rows["dice"] == 0, ["fold", "trainer", "seed"]].to_numpy()
        if len(zero):
            runs = "; ".join(results.run(*run).fold_and_seed for run in zero)
            where = "all runs" if len(zero) == len(rows) else runs
            yield f"{titles[trainer]}: Dice of 0 in all cases of class {name} ({where})."


def _short_trainings(results: SettingResults, titles: dict[str, str]) -> Iterator[str]:
    """Yield a line for each finished run that was ended before the last epoch of its name."""
    epochs = results.epochs.dropna(subset=["seconds"])
    trained = epochs.groupby(["trainer", "fold", "seed"])["epoch"].max() + 1
    for trainer, title in titles.items():
        for fold, seed in results.finished_runs(trainer):
            run = results.run(fold, trainer, seed)
            planned = planned_epochs(run.trainer) or 0
            count = trained.get((trainer, fold, seed), planned)  # other machines' logs may be missing
            if count < planned:
                yield f"{title}, {run.fold_and_seed}: {count} of {planned} epochs were trained."


def _diverged_trainings(results: SettingResults, titles: dict[str, str]) -> Iterator[str]:
    """Yield a line for each training whose loss is not finite or ends above its start."""
    epochs = results.epochs.dropna(subset=["seconds"])  # one may be running
    for (trainer, fold, seed), rows in epochs.groupby(["trainer", "fold", "seed"], sort=False):
        losses = rows.sort_values("epoch")["train_loss"].astype(float)
        end = losses.iloc[-max(1, len(losses) // 10) :].mean()
        if math.isnan(losses.iloc[-1]):
            reason = "its loss is not a number"
        elif len(losses) >= 5 and end > losses.iloc[0]:
            reason = "its loss ends above that of its first epoch"
        else:
            continue
        run = results.run(fold, trainer, seed)
        yield f"{titles[trainer]}, {run.fold_and_seed}: the training diverged ({reason})."
