"""Comparison of a fused step on a GPU with torch's before it is used.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR
from nnunet_cpr.optimizers import _fused_step
from tests.fused.stepping import BOUNDED, DEVICE, parameters, set_gradients, use
from tests.helpers import ROOT


@pytest.fixture(autouse=True)
def _not_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fused_step, "_agrees", {})


def steps(build: type, backend: str) -> Any:
    params = parameters(device=DEVICE.get(backend, "cpu"), shapes=[(60, 50), (5, 4), (7,)])
    optimizer = build(params, lr=0.02, **BOUNDED)
    use(optimizer, backend)
    for t in range(3):
        set_gradients(params, t + 10)
        optimizer.step()
    return optimizer


def shift(backend: Any, plan: Any) -> None:
    with torch.no_grad():
        plan.params[0].mul_(1.001)


def fail(backend: Any, plan: Any) -> None:
    raise AttributeError("'function' object has no attribute 'stats'")


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("build", "fault", "message"),
    [
        (SGDCPR, shift, "torch's result"),
        (AdamCPR, fail, "AttributeError: 'function' object"),
    ],
)
def test_wrong_kernel_is_disabled_with_a_warning(
    fault: Any, message: str, build: type, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnunet_cpr.fused.triton import TritonBackend

    correct = TritonBackend.step

    def wrong(self: Any, groups: Any, matrices: Any, decay: Any) -> None:
        correct(self, groups, matrices, decay)
        fault(self, groups[0][0])

    monkeypatch.setattr(TritonBackend, "step", wrong)
    with pytest.warns(UserWarning, match=f"{message}.*unfused step.*report"):
        found = steps(build, backend)
    assert found._backend is None
    expected = steps(build, "plain")
    for p, q in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"]):
        torch.testing.assert_close(p.cpu(), q)


STEP = """
import torch
from nnunet_cpr import SGDCPR
optimizer = SGDCPR([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1)
optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 3)
optimizer.step()
"""


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


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_an_environment_variable_turns_fused_steps_off(
    build: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNUNET_CPR_FUSED", "0")
    optimizer = build(parameters(shapes=[(5, 4)]), lr=0.1)
    monkeypatch.setattr(torch, "_fused_sgd_", None)
    monkeypatch.setattr(torch, "_fused_adam_", None)
    set_gradients(optimizer.param_groups[0]["params"], 10)
    optimizer.step()
    assert optimizer._backend is None
    monkeypatch.setenv("NNUNET_CPR_FUSED", "no")
    with pytest.raises(ValueError, match="NNUNET_CPR_FUSED: expected 0 or 1, got 'no'"):
        build(parameters(shapes=[(5, 4)]), lr=0.1)
