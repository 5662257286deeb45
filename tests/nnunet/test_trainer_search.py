"""Search for several trainers at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnunet_cpr.nnunet import composition, trainer_files
from nnunet_cpr.nnunet.tools.trainer_search import missing_trainers
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


@pytest.fixture(autouse=True)
def _forget_searches() -> Iterator[None]:
    caches = composition._search, composition._resolve_cached, trainer_files._searched_texts
    for search in caches:
        search.cache_clear()
    yield
    for search in caches:
        search.cache_clear()


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of trainers that nnU-Net searches after ours."""
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(ROOT / "trainers"), str(tmp_path)]))
    (tmp_path / "theirs.py").write_text(THEIRS)
    return tmp_path


def test_trainers_of_all_folders_are_found(theirs: Path) -> None:
    assert missing_trainers(["nnUNetTrainer", "nnUNetTrainerDA5", OURS, "Theirs1"]) == {}


def test_misspelt_trainers_have_hints(theirs: Path) -> None:
    missing = missing_trainers([*WRONG, OURS])
    assert missing[WRONG[0]] == f"unknown suffix _100epochz, did you mean {OURS}?"
    assert "did you mean nnUNetTrainerSGD?" in missing[WRONG[1]]
    assert len(missing) == 2
    reason = missing_trainers(["Theirs2"])["Theirs2"]
    assert reason.startswith(
        "trainer Theirs2 not found by nnU-Net, list its folder in nnUNet_extTrainer"
    )


def test_trainers_made_on_access_are_found(theirs: Path) -> None:
    (theirs / "dynamic.py").write_text(DYNAMIC)
    assert missing_trainers(["Theirs2", "Theirs1"]) == {}
    assert list(missing_trainers(["Theirs2", "Theirs3"])) == ["Theirs3"]


def test_failing_module_of_another_package_is_the_reason(theirs: Path) -> None:
    (theirs / "a_broken.py").write_text("import missing_module_of_theirs\n")
    reason = missing_trainers(["Theirs1"])["Theirs1"]
    assert reason == "ModuleNotFoundError: No module named 'missing_module_of_theirs'"
    (theirs / "a_broken.py").write_text("class\n")
    assert missing_trainers(["Theirs1"])["Theirs1"].startswith("SyntaxError: ")


def test_other_objects_are_no_trainers(theirs: Path) -> None:
    assert missing_trainers(["number"]) == {"number": "number is not a trainer of nnU-Net"}


def test_missing_variable_hides_our_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("nnUNet_extTrainer")
    assert list(missing_trainers([OURS, "nnUNetTrainer"])) == [OURS]
