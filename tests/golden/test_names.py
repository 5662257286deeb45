from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.golden.goldens import read_golden, run_command
from tests.golden.tiny_trainer import build_trainer, nnunet_folders
from tests.golden.trainer_names import (
    NAMES,
    REFUSED,
    REFUSED_DOUBLES,
    described_settings,
    is_found,
    observed_settings,
)

OBSERVED = read_golden("trainers_observed")
DESCRIBED = read_golden("trainers_described")

# nnU-Net itself calls torch's schedulers before the first step, with the number of the epoch.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*lr_scheduler\.step\(\)", r"ignore:The epoch parameter"
)


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with nnunet_folders(tmp_path_factory.mktemp("trainers")):
        yield


def test_golden_has_every_name() -> None:
    assert list(OBSERVED) == list(DESCRIBED) == NAMES
    assert len({str(settings) for settings in OBSERVED.values()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_trainer_of_a_name_has_the_same_settings(name: str) -> None:
    found, expected = observed_settings(name), dict(OBSERVED[name])
    moved = expected.pop("moved")
    assert found.pop("moved") == pytest.approx(moved, rel=1e-3 if "Muon" in name else 1e-4, abs=1e-7)
    rates = expected.pop("learning_rates")
    assert found.pop("learning_rates") == pytest.approx(rates, rel=1e-9)
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_command_describes_a_name_with_the_same_numbers(name: str) -> None:
    assert described_settings(name) == DESCRIBED[name]


def test_seed_decides_the_initial_weights() -> None:
    first, same, other = (
        initial_weights(f"nnUNetTrainerCPR_seed{seed}_1epochs", outside)
        for seed, outside in ((1, 10), (1, 11), (2, 10))
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    without = [initial_weights("nnUNetTrainerCPR_1epochs", outside) for outside in (10, 11)]
    assert not torch.equal(*without)


def initial_weights(name: str, outside: int) -> torch.Tensor:
    """Return the weights of a trainer, built after another seed was set."""
    torch.manual_seed(outside)
    return torch.cat([p.detach().flatten() for p in build_trainer(name).network.parameters()])


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_DOUBLES])
def test_wrong_name_is_not_found(name: str) -> None:
    assert not is_found(name)


@pytest.mark.parametrize(("name", "word"), [*REFUSED.items(), *REFUSED_DOUBLES.items()])
def test_wrong_name_is_corrected(name: str, word: str) -> None:
    done = run_command("trainers", name)
    assert done.status == 1
    (line,) = done.errors.splitlines()
    assert word in line.replace(name, ""), line


def test_training_with_a_wrong_name_ends_with_its_correction() -> None:
    program = Path(sysconfig.get_path("scripts")) / "nnUNetv2_train"
    command = [program, "901", "3d_fullres", "0", "-tr", "nnUNetTrainerCPR_ws2k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "nnUNetTrainerCPR_ws2000" in done.stderr.splitlines()[-1]
