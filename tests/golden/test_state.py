"""State dicts and checkpoints: those of this and of earlier versions load and continue."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.goldens import DATA, read_golden
from tests.golden.optimizer_states import (
    STEPS_AFTER,
    STEPS_BEFORE,
    Case,
    Training,
    cases,
    continued,
    layout,
    old_cases,
)
from tests.golden.tiny_trainer import (
    CHECKPOINTS,
    OLD_CHECKPOINTS,
    checkpoint_layout,
    continue_checkpoint,
    nnunet_folders,
    write_checkpoint,
)

CASES = {case.name: case for case in cases()}
OLD_CASES = {case.name: case for case in old_cases()}
CONTINUED = {version: read_golden(f"states/{version}") for version in ("now", "0.1.0")}
CHECKPOINT_CONTINUED = {version: read_golden(f"checkpoints/{version}") for version in ("now", "0.1.0")}


@pytest.fixture(scope="module")
def saved() -> dict[str, dict[str, Any]]:
    """Return the recorded checkpoints of each version, by case."""
    return {
        version: torch.load(
            io.BytesIO(lzma.decompress((DATA / "states" / f"{version}.pth.xz").read_bytes())),
            weights_only=True,
        )
        for version in CONTINUED
    }


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with nnunet_folders(tmp_path_factory.mktemp("trainers")):
        yield


# A fused step that is given up for the unfused one would not be tested.
pytestmark = pytest.mark.filterwarnings("error:.*fused step:UserWarning")


# Optimizers


@pytest.mark.parametrize("name", CASES)
def test_saved_state_continues_as_recorded(name: str, saved: dict[str, Any]) -> None:
    assert_continued(continued(CASES[name], saved["now"][name]), CONTINUED["now"][name])


@pytest.mark.parametrize("name", OLD_CASES)
def test_state_of_0_1_0_continues_as_recorded(name: str, saved: dict[str, Any]) -> None:
    assert_continued(continued(OLD_CASES[name], saved["0.1.0"][name]), CONTINUED["0.1.0"][name])


@pytest.mark.parametrize("name", CASES)
def test_saved_state_has_the_same_layout_and_values(name: str, saved: dict[str, Any]) -> None:
    checkpoint = Training(CASES[name]).run(STEPS_BEFORE).save()
    for key, value in saved["now"][name]["model"].items():
        torch.testing.assert_close(checkpoint["model"][key], value, **TO_ROUNDING)
    found, expected = checkpoint["optimizer"], saved["now"][name]["optimizer"]
    assert found.keys() == expected.keys()
    assert layout(found["cpr"]) == layout(expected["cpr"])
    assert list(found["cpr"]["state"]) == list(expected["cpr"]["state"])
    for key, value in expected["cpr"]["state"].items():
        torch.testing.assert_close(
            found["cpr"]["state"][key], value, rtol=1e-4, atol=1e-6, equal_nan=True
        )
    assert layout(found["state"]) == layout(expected["state"])
    for group, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        known = {key for key in other if key not in UNUSED}
        assert {key: group[key] for key in known} == {key: other[key] for key in known}


UNUSED = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "adjust_lr")
"""Settings in parameter groups of how a step is computed, and some that torch's version decides."""


@pytest.mark.parametrize("name", CASES)
def test_resumed_training_is_bit_identical(name: str) -> None:
    training = Training(CASES[name]).run(STEPS_BEFORE)
    resumed = continued(CASES[name], training.save())
    whole = training.run(STEPS_AFTER).values()
    assert resumed.keys() == whole.keys()
    assert [key for key in whole if not torch.equal(resumed[key], whole[key])] == []


@pytest.mark.parametrize("version", CONTINUED)
def test_golden_states_have_active_bounds(version: str, saved: dict[str, Any]) -> None:
    """Otherwise CPR would do nothing in a continuation."""
    recorded = list(cases() if version == "now" else old_cases())
    assert list(CONTINUED[version]) == [case.name for case in recorded]
    for name, values in CONTINUED[version].items():
        before = saved[version][name]["optimizer"]["cpr"]["state"]
        bounds = [float(f"{bound:.8g}") for bound in before["kappa"].tolist()]
        is_active = max(before["lagrange_multiplier"].tolist() + values["lagrange_multiplier"]) > 0
        assert is_active or bounds != values["kappa"], name


def test_state_with_other_settings_is_refused(saved: dict[str, Any]) -> None:
    case = Case("SGDCPR", ("KappaWS", 4), {"fused": False})
    with pytest.raises(ValueError, match="steps=4"):
        Training(case).load(saved["now"][Case("SGDCPR", ("KappaWS", 3), {"fused": False}).name])


# Checkpoints of trainers


@pytest.mark.parametrize(
    ("version", "name"),
    [*(("now", name) for name in CHECKPOINTS), *(("0.1.0", name) for name in OLD_CHECKPOINTS)],
)
def test_checkpoint_continues_as_recorded(version: str, name: str) -> None:
    found = continue_checkpoint(CHECKPOINTS[name], DATA / "checkpoints" / version / f"{name}.pth")
    expected = CHECKPOINT_CONTINUED[version][name]
    assert found.pop("epoch") == expected["epoch"] == STEPS_BEFORE
    assert_continued(found, {key: value for key, value in expected.items() if key != "epoch"})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_has_the_same_layout(name: str, tmp_path: Path) -> None:
    write_checkpoint(CHECKPOINTS[name], tmp_path / "checkpoint_final.pth")
    found = checkpoint_layout(tmp_path / "checkpoint_final.pth")
    assert found == checkpoint_layout(DATA / "checkpoints" / "now" / f"{name}.pth")
    assert set(found["keys"]) >= {"network_weights", "optimizer_state", "trainer_name", "init_args"}


def test_checkpoint_of_another_trainer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = DATA / "checkpoints" / "now" / "adamcpr.pth"
    with pytest.raises(SystemExit):
        continue_checkpoint(CHECKPOINTS["sgdcpr"], file)
    assert str(file) in capsys.readouterr().err


def assert_continued(found: dict[str, torch.Tensor], expected: dict[str, list[float]]) -> None:
    """Compare values with recorded ones, to rounding in float32."""
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if key == "lagrange_multiplier" else TO_ROUNDING
        recorded = torch.tensor([float(x) for x in numbers], dtype=torch.float32)
        torch.testing.assert_close(
            found[key].reshape(-1), recorded, **tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


TO_ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
