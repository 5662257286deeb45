"""Fused steps that are turned off, or for which Numba has no cache."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR
from nnunet_cpr.baselines import DecoupledDecay
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers import ROOT
from tests.optimizers.fused.stepping import parameters, set_gradients

STEP = """
import torch
from nnunet_cpr import SGDCPR
optimizer = SGDCPR([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1)
optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 3)
optimizer.step()
"""


@pytest.mark.slow
def test_unwritable_cache_of_numba_is_reported_with_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # root may write to any folder
    locators = "UserProvidedCacheLocator,UserWideCacheLocator"  # not the folder of the package
    environment = {
        **os.environ,
        **{"NUMBA_CACHE_LOCATOR_CLASSES": locators, "PYTHONPATH": str(ROOT)},
        **{"XDG_CACHE_HOME": str(tmp_path / "file"), "HOME": str(tmp_path / "file")},
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "no locator available" in done.stderr
    assert "step is taken instead; set NUMBA_CACHE_DIR=<folder that can be written>" in done.stderr


def refuse(*arguments: Any) -> None:
    raise AssertionError("the kernel takes the step")


@pytest.mark.parametrize("build", [partial(FusedSGD, momentum=0.9), FusedAdam])
@pytest.mark.parametrize("in_group", [False, True])
def test_foreach_takes_torchs_step(build: Any, in_group: bool) -> None:
    params = parameters(shapes=[(5, 4)])
    if in_group:
        optimizer = build([{"params": params, "foreach": True}], lr=0.1)
    else:
        optimizer = build(params, lr=0.1, foreach=True)
    DecoupledDecay(params).attach(optimizer)
    optimizer._find_kernel = lambda device: refuse
    set_gradients(params, 0)
    optimizer.step()


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_an_environment_variable_turns_fused_steps_off(
    build: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNUNET_CPR_FUSED", "0")
    optimizer = build(parameters(shapes=[(5, 4)]), lr=0.1)
    monkeypatch.setattr(torch, "_fused_sgd_", None)
    monkeypatch.setattr(torch, "_fused_adam_", None)
    set_gradients(optimizer.param_groups[0]["params"], 10)
    optimizer._find_kernel = None
    optimizer.step()
    monkeypatch.setenv("NNUNET_CPR_FUSED", "no")
    with pytest.raises(ValueError, match="NNUNET_CPR_FUSED: expected 0 or 1, got 'no'"):
        build(parameters(shapes=[(5, 4)]), lr=0.1)
