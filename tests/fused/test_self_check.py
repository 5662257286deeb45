"""Comparison of a fused step on a GPU with torch's before it is used, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR
from nnunet_cpr.fused import _self_check
from nnunet_cpr.fused.backend import FusedBackend
from tests.helpers import ROOT
from tests.helpers.stepping import BOUNDED, VARIANTS, parameters, set_gradients, use


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> dict[Any, bool]:
    """Forget what has been checked in this process."""
    results: dict[Any, bool] = {}
    monkeypatch.setattr(_self_check, "_passed", results)
    return results


def steps(build: type, backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    params = parameters(dtype, shapes=[(60, 50), (5, 4), (7,)])
    optimizer = build(params, **options)
    use(optimizer, backend)
    for t in range(3):
        set_gradients(params, t + 10)
        optimizer.step()
    return optimizer


ON_A_GPU = pytest.mark.parametrize("backend", ["triton"], indirect=True)


@ON_A_GPU
@pytest.mark.parametrize("variant", VARIANTS)
def test_sound_kernels_pass_for_every_rule(variant: str, backend: str, unchecked: dict) -> None:
    build, options = VARIANTS[variant]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.bfloat16):
            optimizer = steps(build, backend, dtype, **{**BOUNDED, **options})
            assert optimizer._backend.reused_measures == 2
    assert len(unchecked) == 2 and all(unchecked.values())


@ON_A_GPU
def test_each_rule_and_dtype_is_checked_once(
    backend: str, unchecked: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    difference = _self_check._difference
    monkeypatch.setattr(
        _self_check, "_difference", lambda *kind: calls.append(kind[1:]) or difference(*kind)
    )
    for _ in range(2):
        steps(SGDCPR, backend, lr=0.1)
        steps(SGDCPR, backend, lr=0.2, nesterov=False)
        steps(AdamCPR, backend, lr=0.1)
        steps(AdamCPR, backend, torch.bfloat16, lr=0.1, amsgrad=True)
    assert len(calls) == len(set(calls)) == 4


FAULTS = {
    "parameters": lambda group: group.params[0].mul_(1.001),
    "momentum": lambda group: group.state[0][2].add_(1e-3),
    "not a number": lambda group: group.params[1].view(-1)[3:4].fill_(float("nan")),
}


@ON_A_GPU
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_wrong_kernel_is_disabled_with_a_warning(
    fault: str, build: type, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = FusedBackend.step

    def wrong(self: FusedBackend, groups: Any, *rest: Any, **more: Any) -> None:
        correct(self, groups, *rest, **more)
        with torch.no_grad():
            FAULTS[fault](groups[0])

    monkeypatch.setattr(FusedBackend, "step", wrong)
    with pytest.warns(UserWarning, match="expected torch's result.*unfused step.*report"):
        found = steps(build, backend, lr=0.02, **BOUNDED)
    assert found._backend.reused_measures == 0
    expected = steps(build, "plain", lr=0.02, **BOUNDED)
    for p, q in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"]):
        torch.testing.assert_close(p.cpu(), q)


@ON_A_GPU
@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_kernel_that_does_not_compile_is_disabled_with_a_warning(
    build: type, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FusedBackend, groups: Any, *rest: Any, **more: Any) -> None:
        raise AttributeError("'function' object has no attribute 'stats'")

    monkeypatch.setattr(FusedBackend, "step", fail)
    with pytest.warns(UserWarning, match="AttributeError: 'function' object.*unfused step"):
        found = steps(build, backend, lr=0.02, **BOUNDED)
    expected = steps(build, "plain", lr=0.02, **BOUNDED)
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


def test_self_check_leaves_random_state_unchanged() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    steps(AdamCPR, "cpu", lr=0.1)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_an_environment_variable_turns_fused_steps_off(
    build: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNUNET_CPR_FUSED", "0")
    for fused in (None, True):
        optimizer = build(parameters(shapes=[(5, 4)]), lr=0.1, fused=fused)
        assert optimizer._backend is None
        monkeypatch.setattr(torch, "_fused_sgd_", None)
        monkeypatch.setattr(torch, "_fused_adam_", None)
        set_gradients(optimizer.param_groups[0]["params"], 10)
        optimizer.step()
    monkeypatch.setenv("NNUNET_CPR_FUSED", "no")
    with pytest.raises(ValueError, match="NNUNET_CPR_FUSED: expected 0 or 1, got 'no'"):
        build(parameters(shapes=[(5, 4)]), lr=0.1)


def test_nesterov_group_without_momentum_takes_a_step() -> None:
    params = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "momentum": 0.0}]
    optimizer = SGDCPR(groups, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(params[1], torch.full((3, 3), 0.9))
