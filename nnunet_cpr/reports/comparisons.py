"""Comparisons of each trainer with the reference, on the cases of the folds that both have finished."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import pandas as pd

from nnunet_cpr.reports.results import SETTING, Results, Setting, case_means, full_title
from nnunet_cpr.reports.statistics import Paired, compare, holm, verdict
from nnunet_cpr.studies.definition import TrainerEntry

CAVEAT = (
    "Intervals and tests account for the choice of cases. They do not account for the variation between "
    "trainings with different seeds."
)


@dataclass(frozen=True)
class Comparison:
    """Comparison of one trainer with the reference in one setting.

    Attributes:
        entry: the trainer.
        folds: folds that both have finished.
        pairs: indexed by (fold, case): columns reference and other, mean foreground Dice in percent.
        left_out: number of cases of these folds for which only one of the two has a Dice.
        paired: paired statistics, in points of Dice.
        p_holm: p after Holm's correction over the comparisons of the data set.
        sentence: the result in words.
    """

    setting: Setting
    entry: TrainerEntry
    folds: list[int]
    pairs: pd.DataFrame
    left_out: int
    paired: Paired
    p_holm: float = float("nan")
    sentence: str = ""

    @property
    def anchor(self) -> str:
        """Unique name on a page."""
        return "-".join([*self.setting, self.entry.trainer])


def compare_all(results: Results) -> list[Comparison]:
    """Return all comparisons in the study's order, with Holm's correction within each data set."""
    study = results.study
    reference = study.entry(study.reference)
    means = case_means(results.cases)
    found = [
        _compare(results, results.of(means, setting), setting, entry)
        for setting in results.settings
        for entry in study.trainers
        if entry is not reference
    ]
    corrected = []
    for _, family in groupby(found, key=lambda c: c.setting.dataset):
        members = list(family)
        for member, p in zip(members, holm([m.paired.p for m in members])):
            text = verdict(member.paired, p, full_title(member.entry), full_title(reference))
            if 0 < len(member.folds) < len(study.folds):
                text += f" So far {len(member.folds)} of {len(study.folds)} folds."
            if member.left_out:
                cases = "1 case" if member.left_out == 1 else f"{member.left_out} cases"
                text += f" Left out: {cases} with a Dice from one of the two only."
            corrected.append(replace(member, p_holm=p, sentence=text))
    return corrected


def comparison_table(results: Results, comparisons: list[Comparison]) -> pd.DataFrame:
    """Return ``comparisons.csv``: Dice in percent and differences (other - reference) in points."""
    columns = [
        *SETTING,
        *("reference", "trainer", "folds", "cases", "reference_dice_percent", "dice_percent"),
        *("difference_points", "interval_low", "interval_high", "p", "p_holm", "rank_correlation"),
        *("wins", "ties", "losses", "sentence"),
    ]
    rows = []
    for c in comparisons:
        rows.append(
            {
                **c.setting._asdict(),
                "reference": results.study.reference,
                "trainer": c.entry.trainer,
                "folds": " ".join(map(str, c.folds)),
                "cases": c.paired.cases,
                "reference_dice_percent": c.pairs["reference"].mean(),
                "dice_percent": c.pairs["other"].mean(),
                "difference_points": c.paired.difference,
                "interval_low": c.paired.low,
                "interval_high": c.paired.high,
                "p": c.paired.p,
                "p_holm": c.p_holm,
                "rank_correlation": c.paired.rank_correlation,
                "wins": c.paired.wins,
                "ties": c.paired.ties,
                "losses": c.paired.losses,
                "sentence": c.sentence,
            }
        )
    return pd.DataFrame(rows, columns=columns)


def _compare(results: Results, means: pd.DataFrame, setting: Setting, entry: TrainerEntry) -> Comparison:
    reference = results.study.reference
    theirs = results.finished(setting, entry.trainer)
    folds = [fold for fold in results.finished(setting, reference) if fold in theirs]
    values = means[means["fold"].isin(folds)].set_index(["fold", "case"])
    dice = {
        name: 100 * values.loc[values["trainer"] == trainer, "dice"]
        for name, trainer in (("reference", reference), ("other", entry.trainer))
    }
    both = pd.concat(dice, axis=1).astype(float).sort_index()
    # A case without foreground in ground truth and predictions has no Dice.
    pairs = both.dropna()
    left_out = len(both.dropna(how="all")) - len(pairs)
    paired = compare(pairs["reference"].to_numpy(), pairs["other"].to_numpy())
    return Comparison(setting, entry, folds, pairs, left_out, paired)
