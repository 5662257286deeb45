"""Search for several trainers at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnunet_cpr.nnunet import composition
from nnunet_cpr.nnunet.composition import missing_trainers
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
    for search in (composition._search, composition._resolve):
        search.cache_clear()
    yield
    for search in (composition._search, composition._resolve):
        search.cache_clear()


def test_trainers_of_all_folders_are_found_and_others_have_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that nnU-Net searches after ours, and where a class is made on access."""
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(ROOT / "trainers"), str(tmp_path)]))
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "dynamic.py").write_text(DYNAMIC)
    missing = missing_trainers([*WRONG, "Theirs3", OURS, "nnUNetTrainerDA5", "Theirs1", "Theirs2"])
    assert list(missing) == [*WRONG, "Theirs3"]
    assert missing[WRONG[0]] == f"unknown suffix _100epochz, did you mean {OURS}?"
    assert "did you mean nnUNetTrainerSGD?" in missing[WRONG[1]]
    assert missing["Theirs3"].startswith("trainer Theirs3 not found by nnU-Net, list its folder in")
    (tmp_path / "a_broken.py").write_text("import missing_module_of_theirs\n")
    reason = missing_trainers(["Theirs4"])["Theirs4"]
    assert reason == "ModuleNotFoundError: No module named 'missing_module_of_theirs'"
