"""``nnunet-cpr doctor --device``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from nnunet_cpr.cli import app
from nnunet_cpr.nnunet.tools import step_check
from nnunet_cpr.nnunet.tools.step_check import check_steps
from nnunet_cpr.optimizers.kernels import fused_step

CPU = torch.device("cpu")


def test_command_ends_with_a_text_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check, "step_times", lambda device: {"SGDCPR": (1.25, 1.0)})
    said = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert said.exit_code == 0, said.output
    start, *lines, end, hint = said.output.splitlines()
    assert start == end == "```" and hint.endswith("paste this into an issue.")
    assert f"torch: {torch.__version__}" in lines[2] and lines[5].startswith("cpu, ")
    assert len([line for line in lines if line.endswith(" ok")]) == 12
    assert lines[-1] == ("SGDCPR for nnU-Net's 31 M parameters: 1.25 ms, torch's fused step 1 ms")


@pytest.mark.parametrize(
    ("device", "reason"), [("gpu", "expected cuda or cpu, got 'gpu'"), ("cuda", "no CUDA device")]
)
def test_unusable_device_is_refused_in_one_line(device: str, reason: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = CliRunner().invoke(app, ["doctor", "--device", device])
    assert said.exit_code == 1 and said.stdout == ""
    assert said.stderr.startswith("nnunet-cpr: --device: ") and reason in said.stderr


def test_wrong_and_missing_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_step(groups, decays):
        shares = decays()
        return fused_step(groups, lambda: replace(shares, multiplier=1.01 * shares.multiplier))

    def failing_step(*arguments):
        raise OSError("no compiler")

    wrong, missing = (
        next(check_steps(CPU, lambda device, kernel=kernel: kernel))
        for kernel in (wrong_step, failing_step)
    )
    assert wrong.is_fused and wrong.difference > 1000 and wrong.problem == "wrong"
    assert missing.problem == "wrong: OSError: no compiler"
