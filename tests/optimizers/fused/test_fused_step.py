"""Fused steps against unfused steps in float64.

The plain way is CPR's correction and then torch's own step; tests/cpr/test_oracle.py holds it, and the
fused step, to an oracle that knows neither.
"""

from __future__ import annotations

import math

import pytest
import torch

from nnunet_cpr import SGDCPR, AdamCPR, KappaKI0
from tests.optimizers.fused.stepping import (
    BOUNDED,
    SHAPES,
    VARIANTS,
    assert_same,
    parameters,
    run,
    set_gradients,
    use,
    values,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_step_equals_the_unfused_step(variant: str) -> None:
    build, options = VARIANTS[variant]
    options = {**BOUNDED, **options}
    expected = run(build, "plain", torch.float64, **options)
    assert_same(run(build, "cpu", **options), expected, rtol=2e-6)
    assert expected.cpr.lagrange_multiplier.max() > 1e-3


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_cpu_result_does_not_depend_on_threads(build: type) -> None:
    """Use chunks of their default size, about thirty in a task."""
    shapes = [(700, 1000), (30, 64, 3, 3, 3), (1500, 1000), (9,)]
    threads_before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            params = parameters(shapes=shapes)
            optimizer = build(params, lr=0.02, **BOUNDED)
            optimizer._take_torchs_step = None  # all steps are those of kernels
            for t in range(5):
                set_gradients(params, t)
                optimizer.step()
            results.append(optimizer)
    finally:
        torch.set_num_threads(threads_before)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(values(results[0]), values(other)))
        multipliers = [o.cpr.lagrange_multiplier for o in (results[0], other)]
        assert torch.equal(*multipliers) and multipliers[0].max() > 1e-3


def test_parameters_of_several_dtypes_and_groups() -> None:
    """Use double precision matrices with float32 biases, and two learning rates."""
    for build in (SGDCPR, AdamCPR):
        both = []
        for way in ("cpu", "plain"):
            first = parameters(torch.float64, SHAPES[:1])
            full = parameters(torch.float32, SHAPES[1:5])
            groups = [{"params": [*first, full[0]], "lr": 0.05}, {"params": full[1:]}]
            optimizer = build(groups, lr=0.01, **{**BOUNDED, "fused": way == "cpu"})
            use(optimizer, way)
            for t in range(6):
                set_gradients([*first, *full], t)
                optimizer.step()
            both.append(optimizer)
        assert_same(both[0], both[1], rtol=2e-6)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_strides_do_not_matter(build: type) -> None:
    """Use channels-last and transposed parameters, and gradients and moments in another order."""
    shape = (6, 50, 5, 3)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layouts = {
        "contiguous": start.clone(),
        "channels_last": start.to(memory_format=torch.channels_last),
        "transposed": start.transpose(0, 1).contiguous().transpose(0, 1),
        "every_second": start.repeat_interleave(2, dim=1)[:, ::2],
    }
    results = []
    for layout, value in layouts.items():
        p = torch.nn.Parameter(value)
        optimizer = build([p], lr=0.01, kappa=KappaKI0(0.9))
        if layout != "every_second":
            use(optimizer, "cpu")
        for t in range(4):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(t))
            p.grad = noise  # contiguous
            if t == 2:
                state = optimizer.state_dict()
                for entry in state["state"].values():
                    for key, moment in entry.items():
                        entry[key] = moment.contiguous()
                optimizer.load_state_dict(state)
            optimizer.step()
        assert p.stride() == value.stride()
        results.append(p.detach())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_grad_scaler_arguments_are_applied(build: type) -> None:
    """Torch hands a fused optimizer ``grad_scale`` and ``found_inf``: unscale, or do not step."""
    scale = 1024.0
    both = []
    for way in ("cpu", "none"):
        params = parameters()
        optimizer = build(params, lr=0.02, **BOUNDED)
        if way == "cpu":
            use(optimizer, "cpu")
        for t in range(6):
            skipped = way == "cpu" and t in (0, 3)
            if way == "cpu":
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(float(skipped))
            if t in (0, 3) and way != "cpu":
                continue
            set_gradients(params, t, scale if way == "cpu" else 1.0)
            if skipped:
                params[0].grad = torch.full_like(params[0], math.inf)
            optimizer.step()
        both.append(optimizer)
    assert both[0].cpr.step_count == 4
    assert_same(both[0], both[1], rtol=1e-6)
    if build is AdamCPR:
        assert {float(s["step"]) for s in both[0].state.values()} <= {3.0, 4.0}
    ours, plain = ([p.grad for p in o.param_groups[0]["params"]] for o in both)
    for g, h in zip(ours, plain):  # as torch leaves them
        torch.testing.assert_close(g, h)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_nonfinite_elements_do_not_affect_others(build: type) -> None:
    """A mask that is added to logits holds minus infinity, for example."""
    p, q, mask = parameters(shapes=[(60, 50), (60, 50), (40,)])
    with torch.no_grad():
        mask[::3] = -math.inf
    optimizer = build([p, q, mask], lr=0.1, kappa=KappaKI0(0.99), mu=0.1)
    use(optimizer, "cpu")
    multipliers = []
    for t in (20, 21, 22):
        set_gradients([p, q, mask], t)
        if t == 21:
            p.grad[3, 4] = math.nan
        optimizer.step()
        multipliers.append(optimizer.cpr.lagrange_multiplier)
    before, middle, after = multipliers
    assert middle[0] > before[0] and after[0] == middle[0] and after[1] > middle[1] > before[1]
    assert optimizer.cpr.metrics()["skipped_updates"] == 1
    assert q.isfinite().all() and p.isfinite().sum() == p.numel() - 1
    assert (mask[::3] == -math.inf).all() and mask.isfinite().sum() == 26
