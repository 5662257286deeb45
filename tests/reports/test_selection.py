"""Nested selection of settings."""

import io

import pytest
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.comparison import compare_with
from nnunet_cpr.reports.results import Setting, read_results
from nnunet_cpr.reports.selection import choose_compared, selection_notes
from nnunet_cpr.studies.definition import StudyError, TrainerEntry, load
from tests.helpers.report_folds import DATASET, both, study, write_fold

SETTING = Setting(DATASET, "3d_fullres", "nnUNetPlans")
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
    selection = choose_compared(read_results(planned(), tmp_path))
    assert [selection.picks[SETTING, "weight decay", fold] for fold in range(3)] == [DECAYS[1]] * 3
    assert [selection.picks[SETTING, "CPR", fold] for fold in range(3)] == [CPR[0]] * 3
    decay, cpr = selection.entries
    assert selection.reference is decay
    of_decay = selection.results.cases[selection.results.cases["trainer"] == decay.trainer]
    assert of_decay.groupby("fold")["dice"].first().tolist() == pytest.approx([0.65, 0.8, 0.8])
    assert selection.trainer(SETTING, cpr, 2) == CPR[0]


def test_comparison_is_between_the_selected_settings(tmp_path):
    # Each is best on its own fold by luck: the best on the test fold would have 0.92, 0.9 and 0.8.
    write(
        tmp_path,
        {
            DECAYS[0]: [0.92, 0.5, 0.8],
            DECAYS[1]: [0.5, 0.9, 0.7],
            CPR[0]: [0.7, 0.7, 0.7],
            CPR[1]: [0.7, 0.7, 0.7],
        },
    )
    selection = choose_compared(read_results(planned(), tmp_path))
    (found,) = compare_with(selection, selection.reference)
    assert (found.entry.full_title, found.reference.full_title) == (
        "CPR (selected)",
        "weight decay (selected)",
    )
    trained = [selection.trainer(SETTING, selection.reference, fold) for fold in range(3)]
    assert trained == [DECAYS[1], DECAYS[0], DECAYS[0]]
    assert found.difference == pytest.approx(100 * (0.7 - (0.5 + 0.5 + 0.8) / 3))


def test_fold_that_a_setting_has_not_finished_is_left_out(tmp_path):
    dice = {trainer.trainer: [0.8, 0.7, 0.6] for trainer in TRAINERS}
    dice[CPR[1]] = [0.8, 0.7]
    write(tmp_path, dice)
    selection = choose_compared(read_results(planned(), tmp_path))
    folds = [(method, fold) for _, method, fold in selection.picks]
    assert folds == [("weight decay", f) for f in (0, 1, 2)] + [("CPR", f) for f in (0, 1)]


def test_report_shows_the_selected_settings(tmp_path):
    write(tmp_path, {trainer.trainer: [0.8, 0.7, 0.6 + 0.1 * i] for i, trainer in enumerate(TRAINERS)})
    console = Console(file=io.StringIO(), width=200)
    files = write_report(planned(), tmp_path, None, None, tmp_path / "report", console)
    pages = [path.read_text() for path in files if path.suffix in (".html", ".md")]
    for text in [*pages, console.file.getvalue()]:
        text = " ".join(text.replace("\\", "").split())
        assert "found on the test cases" in text
        assert f"{DATASET}, weight decay: wd1en3 (fold 0, 1); wd1en4 (fold 2)." in text
        assert "CPR (selected)" in text and "weight decay (selected)" in text


def test_method_with_one_setting_is_not_called_selected(tmp_path):
    entries = [*TRAINERS[:2], TrainerEntry(CPR[0], "default", "CPR")]
    write(tmp_path, {entry.trainer: [0.8, 0.7, 0.6] for entry in entries})
    results = read_results(planned(*entries), tmp_path)
    selection = choose_compared(results)
    (found,) = compare_with(selection, selection.reference)
    assert found.entry is results.study.trainers[2]
    assert "CPR default instead of weight decay (selected)" in found.sentence
    assert not any("CPR" in note for note in selection_notes(selection))


def test_groups_need_not_be_python_names(tmp_path):
    entries = [TrainerEntry(name, name[-6:], "L²") for name in DECAYS]
    write(tmp_path, {name: [0.6, 0.7, 0.8] for name in DECAYS})
    selection = choose_compared(read_results(planned(*entries), tmp_path))
    assert [entry.group for entry in selection.entries] == ["L²"]


def test_selection_needs_groups_and_folds(tmp_path):
    text = "datasets: A\nselect: true\ntrainers: [B, C]\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(StudyError, match="select: expected a group for each trainer"):
        load(str(tmp_path / "mine.yaml"))
    with pytest.raises(ValueError, match="select: expected at least 2 folds"):
        planned(folds=(0,))


def test_group_without_a_selected_setting_has_a_note(tmp_path):
    write(tmp_path, {DECAYS[0]: [0.7] * 3, DECAYS[1]: [0.7], CPR[0]: [0.6] * 3, CPR[1]: [0.7] * 3})
    notes = selection_notes(choose_compared(read_results(planned(), tmp_path)))
    assert [note for note in notes if "no setting was selected" in note] == [
        f"{DATASET}, weight decay: no setting was selected; expected two folds that all its settings "
        "have finished."
    ]
