"""Nested selection of settings."""

import pytest

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.reports.reading import read_results
from nnunet_cpr.reports.selection import choose_compared
from nnunet_cpr.studies.study import TrainerEntry
from nnunet_cpr.studies.study_file import load
from tests.reports.folds import both, study, write_fold

DECAYS = ("nnUNetTrainerSGD_wd1en4", "nnUNetTrainerSGD_wd1en3")
CPR = ("nnUNetTrainerCPR_ws1000", "nnUNetTrainerCPR_ws2000")
TRAINERS = tuple(TrainerEntry(t, t[-6:], "weight decay") for t in DECAYS) + tuple(
    TrainerEntry(t, t[-6:], "CPR") for t in CPR
)


def planned(*trainers, **changes):
    settings = {"folds": (0, 1, 2), "seeds": (1, 2, 3), "select": True, **changes}
    return study(*(trainers or TRAINERS), **settings)


def write(results, dice, seeds=(1, 2, 3)):
    """Write runs; ``dice`` is {trainer: [Dice of each fold]}."""
    for trainer, folds in dice.items():
        for fold, value in enumerate(folds):
            for seed in seeds:
                cases = {f"case_{fold}{i}": both(value + 0.001 * i) for i in range(4)}
                write_fold(results, f"{trainer}_seed{seed}", fold, cases)


def test_setting_is_selected_on_the_other_folds(tmp_path):
    # The best on fold 0 is the worst on folds 1 and 2, and is not selected for fold 0.
    write(
        tmp_path,
        {
            DECAYS[0]: [0.9, 0.5, 0.5],
            DECAYS[1]: [0.65, 0.8, 0.8],
            CPR[0]: [0.7, 0.7, 0.7],
            CPR[1]: [0.6, 0.6, 0.6],
        },
    )
    selection = choose_compared(read_results(planned(), tmp_path).by_condition()[0])
    assert [selection.picks["weight decay"][fold] for fold in range(3)] == [DECAYS[1]] * 3
    assert [selection.picks["CPR"][fold] for fold in range(3)] == [CPR[0]] * 3
    decay, cpr = selection.results.study.trainers
    assert selection.results.study.reference == decay.trainer
    of_decay = selection.results.cases[selection.results.cases["trainer"] == decay.trainer]
    assert of_decay.groupby("fold")["dice"].first().tolist() == pytest.approx([0.65, 0.8, 0.8])
    assert selection.trainer(cpr, 2) == CPR[0]


def test_selection_needs_groups_and_folds(tmp_path):
    text = "datasets: A\nselect: true\ntrainers: [B, C]\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(Refusal, match="select: expected a group for each trainer"):
        load(str(tmp_path / "mine.yaml"))
    with pytest.raises(ValueError, match="select: expected at least 2 folds"):
        planned(folds=(0,))
