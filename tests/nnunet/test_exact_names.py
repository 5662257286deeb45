"""A name trains exactly what it says, whichever way it is given."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.names.suffixes import METHOD_SUFFIXES
from nnunet_cpr.names.trainer_name import SUFFIXES
from nnunet_cpr.nnunet import composition, trainer_files
from nnunet_cpr.nnunet.tools.trainer_search import missing_trainers
from tests.helpers import ROOT

MINE = """
from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR, nnUNetTrainerSGD


class nnUNetTrainerMine(nnUNetTrainerCPR):
    pass


class nnUNetTrainerOther_ws50(nnUNetTrainerCPR):
    pass


class nnUNetTrainerPlainMine(nnUNetTrainerSGD):
    pass
"""
ADAMW = """
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerAdamW(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cuda")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.initial_lr = 3e-4


class nnUNetTrainerCPR_ws100(nnUNetTrainer):
    pass
"""
TAKEN = {
    "nnUNetTrainerAdamW": "nnUNetTrainerAdamW",
    "nnUNetTrainerAdamW_seed1": "nnUNetTrainerAdamW",
    "nnUNetTrainerCPR_on_nnUNetTrainerAdamW": "nnUNetTrainerAdamW",
    "nnUNetTrainerCPR_ws100": "nnUNetTrainerCPR_ws100",
    "nnUNetTrainerCPR_ws100_seed1": "nnUNetTrainerCPR_ws100",
}
SPELLED = {"<N>": ("50", "60"), "<V>": ("0p1", "0p2"), "": ("", "")}


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Search a folder with a user's trainers before ours, and forget earlier searches."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("nnUNet_extTrainer", os.pathsep.join([str(tmp_path), str(ROOT / "trainers")]))
    forget_searches()
    yield tmp_path
    forget_searches()


def forget_searches() -> None:
    for value in [*vars(composition).values(), *vars(trainer_files).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def contradictions() -> list[tuple[str, str]]:
    """Return pairs of suffixes that set the same field, in both orders."""
    pairs = []
    for first, second in itertools.product(SUFFIXES, repeat=2):
        if first.field == second.field:
            one = first.before + SPELLED[first.placeholder][0] + first.after
            two = second.before + SPELLED[second.placeholder][1] + second.after
            pairs.append((one, two))
    return pairs


PAIRS = contradictions()


def refusal(name: str) -> str:
    """Return the answer of ``nnunet-cpr trainers NAME``, which must be one line."""
    result = CliRunner().invoke(app, ["trainers", name])
    (line,) = result.output.splitlines()
    assert result.exit_code == 1, result.output
    return line


def is_found_by_nnunet(name: str) -> bool:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            recursive_find_trainer_class_by_name(name)
        except (RuntimeError, SystemExit):
            return False
    return True


def test_all_kinds_of_suffixes_have_contradictions() -> None:
    assert len(PAIRS) > 100
    assert {("ws50", "k0p2"), ("l1", "std"), ("seed50", "seed60"), ("awd", "awd")} <= set(PAIRS)
    assert len({suffix.field for suffix in METHOD_SUFFIXES}) == 10


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("nnUNetTrainerCPR", ""),
        ("nnUNetTrainerAMOS", ""),
        ("nnUNetTrainerMine", ""),
        ("nnUNetTrainerAttachCPR", "_on_nnUNetTrainerDA5"),
    ],
)
def test_contradictory_suffixes_are_refused_with_both_names(family: str, on: str) -> None:
    pairs = PAIRS if (family, on) == ("nnUNetTrainerCPR", "") else PAIRS[len(family) % 7 :: 7]
    names = {pair: f"{family}_{'_'.join(pair)}{on}" for pair in pairs}
    for (one, two), name in names.items():
        with pytest.raises(composition.WrongName, match=f"_{one} and _{two} in .*{name}"):
            composition.resolve_settings(name)
    # nnU-Net imports all trainers for each name.
    for pair in pairs[:1]:
        assert not is_found_by_nnunet(names[pair])
        assert f"_{pair[0]} and _{pair[1]}" in refusal(names[pair])
        missing = missing_trainers([names[pair]])[names[pair]]
        assert f"_{pair[0]} and _{pair[1]} contradict each other" in missing


def test_study_with_contradictory_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    raw = tmp_path / "nnUNet_raw" / "Dataset001_A"
    raw.mkdir()
    (raw / "dataset.json").write_text(json.dumps({"file_ending": ".nii.gz"}))
    names = ["nnUNetTrainerCPR_ws100_k0p1", "nnUNetTrainerMine_lr1en3_lr1en2"]
    study = {"name": "s", "datasets": ["Dataset001_A"], "trainers": names, "folds": [0, 1]}
    (tmp_path / "s.yaml").write_text(json.dumps({**study, "reference": names[0]}))
    result = CliRunner().invoke(app, ["study", "run", str(tmp_path / "s.yaml"), "--dry-run"])
    assert result.exit_code == 1
    assert "_ws100 and _k0p1 contradict each other" in result.output
    assert "_lr1en3 and _lr1en2 contradict each other" in result.output


def test_written_class_with_a_suffix_in_its_name_takes_others() -> None:
    assert composition.resolve_settings("nnUNetTrainerOther_ws50_seed1").seed == 1
    with pytest.raises(composition.WrongName, match="_ws50 and _k0p1 in 'nnUNetTrainerOther_ws50_k0p1'"):
        composition.resolve_settings("nnUNetTrainerOther_ws50_k0p1")
    assert not is_found_by_nnunet("nnUNetTrainerOther_ws50_k0p1")


@pytest.mark.parametrize(("name", "taken"), TAKEN.items())
def test_name_taken_by_a_users_class_is_refused(name: str, taken: str, theirs: Path) -> None:
    file = theirs / "theirs.py"
    file.write_text(ADAMW)
    line = refusal(name)
    assert (
        line.startswith(f"nnunet-cpr: {taken}: expected a trainer of nnunet-cpr") and str(file) in line
    )
    assert "rename that class, for example to nnUNetTrainerMy" in line
    assert str(file) in missing_trainers([name, "nnUNetTrainerCPR"])[name]
    if name not in ADAMW:  # else nnU-Net trains the user's class, which needs nothing from us
        assert not is_found_by_nnunet(name)


def test_taken_name_may_be_a_class_derived_from_ours(theirs: Path) -> None:
    (theirs / "theirs.py").write_text(
        "from nnunet_cpr.nnunet.trainer import nnUNetTrainerAdamW as Base\n\n"
        "class nnUNetTrainerAdamW(Base):\n    pass\n"
    )
    for name in ("nnUNetTrainerAdamW_seed1", "nnUNetTrainerCPR_on_nnUNetTrainerAdamW"):
        assert not is_found_by_nnunet(name)
        assert str(theirs / "theirs.py") in refusal(name)


def test_imported_and_mentioned_families_are_not_taken(theirs: Path) -> None:
    (theirs / "imports.py").write_text(
        "# nnUNetTrainerCPR_ws100\nfrom nnunet_cpr.nnunet.trainer import nnUNetTrainerAdamW\n"
    )
    for name in ("nnUNetTrainerAdamW_seed1", "nnUNetTrainerCPR_ws100_seed1", "nnUNetTrainerMine_seed1"):
        assert composition.resolve_settings(name).seed == 1
        assert is_found_by_nnunet(name)
