"""A name trains exactly what it says, whichever way it is given."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

from nnunet_cpr.names.trainer_name import SUFFIXES
from nnunet_cpr.nnunet import composition
from nnunet_cpr.nnunet.tools.trainer_search import missing_trainers
from tests.helpers import ROOT

MINE = """
from nnunet_cpr.nnunet.trainer import nnUNetTrainerCPR


class nnUNetTrainerMine(nnUNetTrainerCPR):
    pass


class nnUNetTrainerOther_ws50(nnUNetTrainerCPR):
    pass


"""
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
    for value in vars(composition).values():
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


def is_found_by_nnunet(name: str) -> bool:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            recursive_find_trainer_class_by_name(name)
        except (RuntimeError, SystemExit):
            return False
    return True


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
        missing = missing_trainers([names[pair]])[names[pair]]
        assert f"_{pair[0]} and _{pair[1]} contradict each other" in missing


def test_written_class_with_a_suffix_in_its_name_takes_others() -> None:
    assert composition.resolve_settings("nnUNetTrainerOther_ws50_seed1").seed == 1
    with pytest.raises(composition.WrongName, match="_ws50 and _k0p1 in 'nnUNetTrainerOther_ws50_k0p1'"):
        composition.resolve_settings("nnUNetTrainerOther_ws50_k0p1")
    assert not is_found_by_nnunet("nnUNetTrainerOther_ws50_k0p1")
