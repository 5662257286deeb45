"""Number of threads of a training on the CPU."""

from __future__ import annotations

import pytest
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from nnunet_cpr.nnunet.cpu_threads import CPU_THREADS
from tests.helpers.workspace import Workspace

TRAINER = "nnUNetTrainerCPR_ki0x0p9_1epochs_2iters_seed1"


def test_variable_wins_over_nnunets_number_of_cores(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands run here tell nnU-Net that there is one core."""

    def stop(trainer: nnUNetTrainer, batch: dict) -> dict:
        raise SystemExit(torch.get_num_threads())

    monkeypatch.setattr(nnUNetTrainer, "train_step", stop)
    monkeypatch.setenv(CPU_THREADS, "3")
    with pytest.raises(SystemExit) as stopped:
        workspace.train_here(TRAINER)
    assert stopped.value.code == 3


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "4,2"])
def test_wrong_value_ends_the_training_with_one_line(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
) -> None:
    monkeypatch.setenv(CPU_THREADS, value)
    with pytest.raises(SystemExit) as stop:
        workspace.train_here(TRAINER)
    assert stop.value.code == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"nnunet-cpr: {CPU_THREADS}: expected a positive whole number, got")
