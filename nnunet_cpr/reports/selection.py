"""Nested selection: the best setting of each method, selected on the other folds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from nnunet_cpr.reports.results import Results, run_means, unique
from nnunet_cpr.studies.definition import TrainerEntry


@dataclass(frozen=True)
class Compared:
    """The trainers that are compared in a part: those of the study, or selected settings of its methods.

    Attributes:
        study_results: results of the study in this part.
        results: the results to compare; after a selection ``trainer`` in the cases is an entry's name.
        entries: the study's trainers, or one entry for each method.
        reference, non_inferior_to: the entries of the study's trainers of these names.
        picks: the selected trainer of each method and fold; empty without a selection.
    """

    study_results: Results
    results: Results
    entries: tuple[TrainerEntry, ...]
    reference: TrainerEntry
    non_inferior_to: TrainerEntry
    picks: dict[tuple[str, int], str]

    def trainer(self, entry: TrainerEntry, fold: int) -> str:
        """Return the trainer of an entry in a fold."""
        return self.picks.get((entry.group, fold), entry.trainer)


def choose_compared(results: Results) -> Compared:
    """Return the trainers to compare in a part, after the selection if the study asks for one.

    For each fold, the setting of each group with the best mean on the other folds is selected. The mean
    is that of the study's first metric over the runs of the other folds, with the seeds that all
    settings of the group have finished. A fold is left out if some setting has not finished it, or if no
    other fold remains to select on. The runs that it is selected by have trained on the cases of the
    fold, but were not validated on them: no setting is selected by the values that it is compared by.
    """
    study = results.study
    if not study.select:
        reference, non_inferior_to = study.entry(study.reference), study.entry(study.non_inferior_to)
        return Compared(results, results, study.trainers, reference, non_inferior_to, {})
    entries = _entries(study.trainers)
    cases, metric = results.cases, results.metrics[0]
    means = run_means(cases, metric.name)
    chosen_cases, picks = [cases.iloc[:0]], {}
    for group, entry in entries.items():
        trainers = [entry.trainer for entry in study.trainers if entry.group == group]
        finished = [set(results.finished_runs(trainer)) for trainer in trainers]
        common, seeds = results.largest_rectangle(set.intersection(*finished))
        mine = means[means["seed"].isin(seeds)]
        for fold in common:
            others = mine["fold"].isin([f for f in common if f != fold])
            by_trainer = metric.sign * mine[others].groupby("trainer")[metric.name].mean()
            scores = [by_trainer.get(trainer, np.nan) for trainer in trainers]
            if np.isnan(scores).all():
                continue
            best = trainers[int(np.nanargmax(scores))]
            picks[group, fold] = best
            chosen = cases[(cases["trainer"] == best) & (cases["fold"] == fold)]
            chosen_cases.append(chosen.assign(trainer=entry.trainer))
    return Compared(
        results,
        replace(results, cases=pd.concat(chosen_cases, ignore_index=True)),
        tuple(entries.values()),
        entries[study.entry(study.reference).group],
        entries[study.entry(study.non_inferior_to).group],
        picks,
    )


def _entries(trainers: tuple[TrainerEntry, ...]) -> dict[str, TrainerEntry]:
    """Return one entry for each group; that of a group with one setting is the study's own."""
    entries: dict[str, TrainerEntry] = {}
    for group in unique([entry.group for entry in trainers]):
        settings = [entry for entry in trainers if entry.group == group]
        name = "selected_" + re.sub(r"\W", "_", group, flags=re.ASCII)
        while any(name == entry.trainer for entry in entries.values()):
            name += "_"
        entries[group] = settings[0] if len(settings) == 1 else TrainerEntry(name, "(selected)", group)
    return entries


def selection_notes(compared: Sequence[Compared]) -> list[str]:
    """Return notes with the selected settings of all parts; none if no group has several."""
    study = compared[0].results.study
    settings = Counter(entry.group for entry in study.trainers)
    if not study.select or max(settings.values()) == 1:
        return []
    notes = [
        "The best values of the table were found on the test cases and are too good. The comparisons "
        "are between settings that were selected on the other folds:"
    ]
    for part, (group, count) in product(compared, settings.items()):
        folds: dict[str, list[str]] = {}
        for (of_group, fold), trainer in part.picks.items():
            if of_group == group:
                folds.setdefault(study.entry(trainer).title, []).append(str(fold))
        chosen = "; ".join(f"{title} (fold {', '.join(of_title)})" for title, of_title in folds.items())
        none = "no setting was selected; expected two folds that all its settings have finished"
        if count > 1:
            notes.append(f"{part.results.title}, {group}: {chosen or none}.")
    return notes
