"""Search for several trainers at once, and names of ours that a user's class has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet import classes
from nnunet_cpr.nnunet.classes import missing_trainers, resolve_settings
from nnunet_cpr.nnunet.tools.doctor import check_installation
from tests.helpers import ROOT

OURS = "nnUNetTrainerCPR_ws200_100epochs"
WRONG = [OURS.replace("epochs", "epochz"), "nnUNetTrainerSDG"]
THEIRS = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

number = 1

class Theirs1(nnUNetTrainer):
    pass
"""
DYNAMIC = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

def __getattr__(name):
    if name == "Theirs2":
        return type(name, (nnUNetTrainer,), {})
    raise AttributeError(name)
"""


TAKING = """
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunet_cpr.nnunet.trainer import nnUNetTrainer{0} as Ours, nnUNetTrainerCPR

class nnUNetTrainer{0}({1}):
    pass

class nnUNetTrainer{0}_big(nnUNetTrainer):
    pass
"""


def forget_searches() -> None:
    for search in (classes.search, classes._resolve):
        search.cache_clear()


@pytest.fixture(autouse=True)
def _forget_searches() -> Iterator[None]:
    forget_searches()
    yield
    forget_searches()


@pytest.mark.parametrize("name", ["CPR", "join", "nnUNetTrainerCPR_on_CPR"])
def test_names_that_modules_import_are_no_trainers(name: str) -> None:
    """nnU-Net finds classes and functions that the modules of trainers import, and fails."""
    (reason,) = missing_trainers([name]).values()
    other = name.rpartition("_")[2]
    assert f"trainer {other} not found by nnU-Net, " in reason
    assert other != "CPR" or reason.endswith("did you mean nnUNetTrainerCPR?")


def test_trainers_of_all_folders_are_found_and_others_have_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that nnU-Net searches after ours, and where a class is made on access."""
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(ROOT / "trainers"), str(tmp_path)]))
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "dynamic.py").write_text(DYNAMIC)
    missing = missing_trainers([*WRONG, "Mine", OURS, "nnUNetTrainerDA5", "Theirs1", "Theirs2"])
    assert list(missing) == [*WRONG, "Mine"]
    assert missing[WRONG[0]] == f"unknown suffix _100epochz, did you mean {OURS}?"
    assert "did you mean nnUNetTrainerSGD?" in missing[WRONG[1]]
    assert missing["Mine"].startswith("trainer Mine not found by nnU-Net, list its folder in")
    (tmp_path / "a_broken.py").write_text("import missing_module_of_theirs\n")
    reason = missing_trainers(["Theirs4"])["Theirs4"]
    assert reason == "ModuleNotFoundError: No module named 'missing_module_of_theirs'"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's folder that nnU-Net searches before ours."""
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), str(ROOT / "trainers")]))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "taken", "file", "base"),
    [
        ("nnUNetTrainerAdamW_warmup2_2epochs_3iters_seed1", "AdamW", "mine.py", "Ours"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("nnUNetTrainerAdamW", "AdamW", "mine.py", "nnUNetTrainer"),
                ("nnUNetTrainerAdamW_seed1_on_nnUNetTrainerDA5", "AdamW", "mine.py", "nnUNetTrainer"),
                ("nnUNetTrainerCPR_on_nnUNetTrainerAdamW", "AdamW", "mine.py", "nnUNetTrainer"),
                ("nnUNetTrainerTimm", "Timm", "mine.py", "Ours"),
                ("nnUNetTrainerAMOS_seed1", "AMOS", "nnUNetTrainerAMOS.py", "nnUNetTrainer"),
            )
        ),
    ],
)
def test_family_that_a_users_class_has_taken_is_refused_in_one_line(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, name: str, taken: str, file: str, base: str
) -> None:
    (theirs / file).write_text(TAKING.format(taken, base))
    line = (
        f"nnUNetTrainer{taken}: this name of nnunet-cpr is taken by a class in {theirs / file}; rename "
        f"that class, for example to nnUNetTrainerMy{taken}"
    )
    if name != "nnUNetTrainerTimm":  # whose optimizers are listed
        said = CliRunner().invoke(app, ["trainers", name])
        assert (said.exit_code, said.stdout, said.stderr) == (1, "", f"nnunet-cpr: {line}\n")
    assert missing_trainers([name]) == {name: line.replace("; ", ", ")}  # of a study
    if name != f"nnUNetTrainer{taken}":  # whose class nnU-Net trains without us
        forget_searches()
        monkeypatch.setattr(sys, "argv", ["nnUNetv2_train"])
        with pytest.raises(SystemExit, match=f"^nnunet-cpr: {line}$"):
            recursive_find_trainer_class_by_name(name)
    (finding,) = (each for each in check_installation() if each.subject == "trainers")
    assert (finding.message, finding.remedy) == (line, f"grep -nw nnUNetTrainer{taken} {theirs / file}")


def test_names_beside_those_of_families_are_not_taken(theirs: Path) -> None:
    (theirs / "mine.py").write_text(
        TAKING.format("CPR", "nnUNetTrainer").replace("class nnUNetTrainerCPR(", "class Mine(")
    )
    assert resolve_settings("nnUNetTrainerCPR_seed1") is not None, "their module imports ours"
    assert missing_trainers(["nnUNetTrainerCPR_big", "nnUNetTrainerCPR"]) == {}
    (theirs / "taking.py").write_text(TAKING.format("AdamW", "nnUNetTrainer"))
    assert missing_trainers(["nnUNetTrainerAdamW_big"]) == {}, (
        "a trainer of theirs, as its name is not ours"
    )
