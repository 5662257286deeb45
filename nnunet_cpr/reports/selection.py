"""Nested selection: the best setting of each method, selected on the other folds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pandas as pd

from nnunet_cpr.reports.results import ConditionResults, run_means, unique
from nnunet_cpr.studies.study import TrainerEntry


@dataclass(frozen=True)
class Compared:
    """The trainers that are compared in a condition: those of the study, or selected of its methods.

    Attributes:
        of_study: results of all trainers.
        results: the results to compare; after a selection the study's trainers are one for each method.
        picks: the selected trainer of each method by fold; empty without a selection.
    """

    of_study: ConditionResults
    results: ConditionResults
    picks: dict[str, dict[int, str]]

    def trainer(self, entry: TrainerEntry, fold: int) -> str:
        """Return the trainer of an entry in a fold."""
        return self.picks.get(entry.group, {}).get(fold, entry.key)


def choose_compared(results: ConditionResults) -> Compared:
    """Return the trainers to compare in a condition, after the selection if the study asks for one.

    For each fold, the trainer of each group with the best mean on the other folds is selected. The mean
    is that of the study's first metric over the runs of the other folds, with the seeds that all
    trainers of the group have finished. A fold is left out if some trainer has not finished it, or if no
    other fold remains to select on. The runs that it is selected by have trained on the cases of the
    fold, but were not validated on them: no trainer is selected by the values that it is compared by.
    """
    study, cases = results.study, results.cases
    if not study.select:
        return Compared(results, results, {})
    entries = _entries(study.trainers)
    picks = {group: _select(results, group) for group in entries}
    chosen = [
        cases[(cases["trainer"] == trainer) & (cases["fold"] == fold)].assign(trainer=entry.key)
        for group, entry in entries.items()
        for fold, trainer in picks[group].items()
    ]
    methods = replace(
        study,
        trainers=tuple(entries.values()),
        reference=entries[study.entry(study.reference).group].key,
        non_inferior_to=entries[study.entry(study.non_inferior_to).group].key,
    )
    cases = pd.concat([cases.iloc[:0], *chosen], ignore_index=True)
    return Compared(results, replace(results, study=methods, cases=cases), picks)


def _select(results: ConditionResults, group: str) -> dict[int, str]:
    """Return the trainer of a group that is selected for each fold."""
    trainers = [entry.key for entry in results.study.trainers if entry.group == group]
    finished = [set(results.finished_runs(trainer)) for trainer in trainers]
    folds, seeds = results.largest_rectangle(set.intersection(*finished))
    metric = results.metrics[0]
    means = metric.sign * run_means(results.cases, metric.name).pivot(
        index=["fold", "seed"], columns="trainer", values=metric.name
    )
    runs = pd.MultiIndex.from_product([folds, seeds], names=["fold", "seed"])
    means = means.reindex(index=runs, columns=trainers)
    scores = {fold: means.drop(index=fold, level="fold").mean() for fold in folds}
    return {fold: str(score.idxmax()) for fold, score in scores.items() if score.notna().any()}


def _entries(trainers: tuple[TrainerEntry, ...]) -> dict[str, TrainerEntry]:
    """Return one entry for each group; that of a group with one trainer is the study's own."""
    entries: dict[str, TrainerEntry] = {}
    for group in unique([entry.group for entry in trainers]):
        settings = [entry for entry in trainers if entry.group == group]
        name = "selected_" + re.sub(r"\W", "_", group, flags=re.ASCII)
        while any(name == entry.key for entry in entries.values()):
            name += "_"
        entries[group] = settings[0] if len(settings) == 1 else TrainerEntry(name, "(selected)", group)
    return entries


def selection_notes(compared: Sequence[Compared]) -> list[str]:
    """Return notes with the selected settings of all methods; none if no group has several."""
    study = compared[0].of_study.study
    several = [g for g, n in Counter(entry.group for entry in study.trainers).items() if n > 1]
    if not study.select or not several:
        return []
    notes = [
        "The best values of the table were found on the test cases and are too good. The comparisons "
        "are between settings that were selected on the other folds:"
    ]
    for each, group in product(compared, several):
        folds: dict[str, list[str]] = {}
        for fold, trainer in each.picks[group].items():
            folds.setdefault(study.entry(trainer).title, []).append(str(fold))
        chosen = "; ".join(f"{title} (fold {', '.join(of_title)})" for title, of_title in folds.items())
        none = "no setting was selected; expected two folds that all its settings have finished"
        notes.append(f"{each.results.title}, {group}: {chosen or none}.")
    return notes
