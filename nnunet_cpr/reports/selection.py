"""Nested selection: the best setting of each method, selected on the other folds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from nnunet_cpr.reports.metrics import METRICS
from nnunet_cpr.reports.results import Results, Setting, in_order, run_means
from nnunet_cpr.studies.definition import TrainerEntry


@dataclass(frozen=True)
class Selection:
    """The selected settings of a study's methods.

    Attributes:
        cases: the cases of the selected settings, as in :class:`~nnunet_cpr.reports.results.Results`;
            ``trainer`` is the name of an entry.
        entries: one entry for each method.
        reference, non_inferior_to: the entries of the study's trainers of these names.
        picks: columns of a setting, method, fold and the selected trainer.

    The entry of a method with one setting is that of the study, as nothing was selected.
    """

    cases: pd.DataFrame
    entries: tuple[TrainerEntry, ...]
    reference: TrainerEntry
    non_inferior_to: TrainerEntry
    picks: pd.DataFrame

    def trainer(self, setting: Setting, entry: TrainerEntry, fold: int) -> str:
        """Return the trainer that was selected for a fold."""
        rows = self.picks[
            (self.picks[list(Setting._fields)] == list(setting)).all(axis=1)
            & (self.picks["method"] == entry.group)
            & (self.picks["fold"] == fold)
        ]
        return str(rows["trainer"].iloc[0])


def selection_notes(results: Results) -> list[str]:
    """Return notes with the selected settings; none for a study without ``select``."""
    study = results.study
    settings = Counter(entry.group for entry in study.trainers)
    if not study.select or max(settings.values()) == 1:
        return []
    notes = [
        "The best values of the table were found on the test cases and are too good. The comparisons "
        "are between settings that were selected on the other folds:"
    ]
    picks = select_settings(results).picks
    for (*parts, method), rows in picks.groupby([*Setting._fields, "method"], sort=False):
        if settings[method] == 1:
            continue
        folds = rows.groupby("trainer", sort=False)["fold"].apply(lambda of: ", ".join(map(str, of)))
        chosen = [f"{study.entry(str(t)).title} (fold {numbers})" for t, numbers in folds.items()]
        notes.append(f"{results.title(Setting(*parts))}, {method}: {'; '.join(chosen)}.")
    for setting, (group, number) in product(results.settings, settings.items()):
        mine = (picks[list(Setting._fields)] == list(setting)).all(axis=1) & (picks["method"] == group)
        if number > 1 and not mine.any():
            notes.append(
                f"{results.title(setting)}, {group}: no setting was selected; expected two folds that "
                "all settings of the group finished."
            )
    return notes


def select_settings(results: Results) -> Selection:
    """Select for each fold the setting of each group with the best mean on the other folds.

    The mean is that of the study's first metric over the runs of the other folds, with the seeds that
    all settings of the group have finished. A fold is left out if some setting has not finished it,
    or if no other fold remains to select on. The selected settings are compared on cases that had no
    part in their selection, so the comparison has no bias from the selection.

    Args:
        results: results of a study with ``select``.
    """
    study = results.study
    groups = in_order([entry.group for entry in study.trainers])
    entries: dict[str, TrainerEntry] = {}
    for group in groups:
        settings = [entry for entry in study.trainers if entry.group == group]
        if len(settings) == 1:
            entries[group] = settings[0]
            continue
        name = "selected_" + re.sub(r"\W", "_", group, flags=re.ASCII)
        while any(name == entry.trainer for entry in entries.values()):
            name += "_"
        entries[group] = TrainerEntry(name, "(selected)", group)
    metric = METRICS[study.metrics[0]]
    sign = 1 if metric.higher_is_better else -1
    means = run_means(results.cases, metric.name)
    parts, picks = [], []
    for setting in results.settings:
        of_setting = results.of(means, setting)
        cases = results.of(results.cases, setting)
        for group in groups:
            trainers = [entry.trainer for entry in study.trainers if entry.group == group]
            finished = [set(results.finished_runs(setting, trainer)) for trainer in trainers]
            common, seeds = results.largest_rectangle(set.intersection(*finished))
            mine = of_setting[of_setting["seed"].isin(seeds)]
            for fold in common:
                others = mine["fold"].isin([f for f in common if f != fold])
                by_trainer = sign * mine[others].groupby("trainer")[metric.name].mean()
                scores = [by_trainer.get(trainer, np.nan) for trainer in trainers]
                if np.isnan(scores).all():
                    continue
                best = trainers[int(np.nanargmax(scores))]
                picks.append({**setting._asdict(), "method": group, "fold": fold, "trainer": best})
                chosen = cases[(cases["trainer"] == best) & (cases["fold"] == fold)]
                parts.append(chosen.assign(trainer=entries[group].trainer))
    columns = [*Setting._fields, "method", "fold", "trainer"]

    def of(trainer: str) -> TrainerEntry:
        return entries[study.entry(trainer).group]

    return Selection(
        pd.concat(parts, ignore_index=True) if parts else results.cases.iloc[:0],
        tuple(entries.values()),
        of(study.reference),
        of(study.non_inferior_to),
        pd.DataFrame(picks, columns=columns),
    )
