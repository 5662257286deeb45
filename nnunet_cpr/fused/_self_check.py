"""Comparison of a backend with torch's unfused step, before a training relies on it.

A kernel with wrong results, because of a bug in a compiler, driver or GPU, would silently spoil a
training. At the first use of each rule and dtype in a process, the backend and torch both step small
random tensors on the device of the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr.fused.backend import FusedBackend, GroupStep, Rule

_SHAPES = ((70, 300), (5, 3), (1, 1))
_TOLERANCE = 32
"""Tolerance in units of the dtype's precision: kernels may contract and reorder operations."""

_passed: dict[Any, bool] = {}


def compiler_works(compiler: str, device: str, trial: Callable[[], bool]) -> bool:
    """Return the result of a trial kernel; False with a warning if it raises."""
    try:
        return trial()
    except Exception as error:  # compilers have no common exception class
        # Numba's, if neither the folder of this package nor the user's cache can be written.
        is_cache = "cannot cache function" in str(error)
        advice = "; set NUMBA_CACHE_DIR=<folder that can be written>" if is_cache else ""
        warnings.warn(
            f"CPR's fused step on the {device} is disabled: {compiler} cannot compile a kernel "
            f"({type(error).__name__}: {error}); the slower unfused step is taken instead{advice}",
            stacklevel=3,
        )
        return False


def passes_self_check(backend: FusedBackend, groups: Sequence[GroupStep]) -> bool:
    """Return True if a backend agrees with torch for the rules and dtypes of the groups.

    Kernels on the CPU are tested where they run, but no test of this package has run on a GPU. The
    result is cached. A difference beyond rounding gives a warning.
    """
    if not backend.needs_self_check:
        return True
    kinds = {_kind(launch) for group in groups if group.params for launch in group.by_dtype()}
    if _is_capturing(backend.device):  # the steps before the capture were checked
        return all(_passed.get((type(backend), backend.device, *kind), True) for kind in kinds)
    return all(_passes(backend, *kind) for kind in kinds)


def _kind(launch: GroupStep) -> tuple[Any, ...]:
    """Return the rule, without its numbers, and the dtypes of a kernel launch."""
    rule, (moments, *_) = launch.rule, launch.state
    amsgrad = rule.adam and bool(launch.state[-1])
    has_momentum = rule.adam or rule.beta1 != 0
    has_nesterov = has_momentum and bool(rule.nesterov)  # torch refuses it without momentum
    dtype = launch.params[0].dtype
    moment = moments[0].dtype if moments else dtype
    return (rule.adam, has_momentum, has_nesterov, amsgrad, bool(rule.maximize), dtype, moment)


def _passes(backend: FusedBackend, *kind: Any) -> bool:
    key = (type(backend), backend.device, *kind)
    if key not in _passed:
        try:
            worst = _difference(backend, *kind)
            result = f"a difference of {worst:.3g} times the precision of {kind[-2]}"
        except Exception as error:  # compilers have no common exception class
            worst, result = float("inf"), f"{type(error).__name__}: {error}"
        _passed[key] = worst <= _TOLERANCE
        if not _passed[key]:
            warnings.warn(
                f"CPR's fused step on {backend.device}: expected torch's result, got {result} (adam, "
                f"momentum, nesterov, amsgrad, maximize: {kind[:5]}); the unfused step is taken instead "
                "in this process; please report this with the versions of torch, Triton and Numba and "
                "the device",
                stacklevel=2,
            )
    return _passed[key]


def _difference(
    backend: FusedBackend,
    adam: bool,
    has_momentum: bool,
    nesterov: bool,
    amsgrad: bool,
    maximize: bool,
    dtype: torch.dtype,
    moment: torch.dtype,
) -> float:
    """Return the largest difference after a step, in units of the dtype's precision."""
    rule = Rule(
        adam=adam,
        lr=0.05,
        beta1=0.9 if has_momentum else 0.0,
        beta2=0.99 if adam else 0.0,
        eps=1e-3,
        nesterov=nesterov,
        maximize=maximize,
    )
    generator = torch.Generator("cpu").manual_seed(0)  # leaves the global generator alone

    def random(dtype: torch.dtype, positive: bool = False) -> list[Tensor]:
        options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        values = [torch.randn(s, **options) for s in _SHAPES]
        return [(v.abs() if positive else v).to(backend.device, dtype) for v in values]

    params, grads = random(dtype), random(dtype)
    state = [random(moment) if has_momentum else []]
    if adam:
        state += [
            random(moment, positive=True),
            random(moment, positive=True) if amsgrad else [],
        ]
    count = torch.full((), 3.0, dtype=torch.float32, device=backend.device)
    steps = [count.clone() for _ in params] if adam else []
    matrices = [0, -1, 1]
    decay = torch.tensor([0.2, -0.1], dtype=torch.float32, device=backend.device)
    group = GroupStep(rule, params, grads, state, steps, matrices)
    expected = _unfused(group, [0.2, 0.0, -0.1])

    trial = type(backend)([params[0], params[2]], backend.device)
    if not (group.is_regular() and trial.supports([group])):
        return float("inf")
    trial.step([group], decay)
    sums = trial.sums_of_squares()
    found = [*params, *(t for column in state for t in column)]
    worst = max(_distance(t, e, torch.finfo(t.dtype).eps) for t, e in zip(found, expected, strict=True))
    squares = torch.stack([p.double().square().sum() for p in (params[0], params[2])])
    return max(worst, _distance(sums, squares, torch.finfo(torch.float32).eps))


def _unfused(group: GroupStep, decays: list[float]) -> list[Tensor]:
    """Return parameters and state after the decays and torch's unfused step in float64."""
    rule = group.rule
    params = [torch.nn.Parameter(p.double()) for p in group.params]
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if rule.adam else ("momentum_buffer",)
    columns = [[t.double() for t in column] for column in group.state]
    common: Any = {"lr": rule.lr, "maximize": rule.maximize, "foreach": False, "fused": False}
    optimizer: torch.optim.Optimizer
    if rule.adam:
        betas, amsgrad = (rule.beta1, rule.beta2), bool(group.state[2])
        optimizer = torch.optim.Adam(params, betas=betas, eps=rule.eps, amsgrad=amsgrad, **common)
    else:
        optimizer = torch.optim.SGD(params, momentum=rule.beta1, nesterov=rule.nesterov, **common)
    for i, p in enumerate(params):
        p.grad = group.grads[i].double()
        state = {key: column[i] for key, column in zip(keys, columns) if column}
        if rule.adam:
            state["step"] = group.steps[i].cpu() - 1  # the fused step gets the counts after the step
        optimizer.state[p].update(state)
        with torch.no_grad():
            p.mul_(1 - decays[i])
    optimizer.step()
    return [p.detach() for p in params] + [t for column in columns for t in column]


def _distance(found: Tensor, expected: Tensor, precision: float) -> float:
    difference = (found.double() - expected.double()).abs() / (expected.double().abs() + 1)
    worst = float(difference.max()) / precision
    return worst if worst == worst else float("inf")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
