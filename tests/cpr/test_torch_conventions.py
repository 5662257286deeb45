"""Conventions of torch's optimizers for parameters and arguments."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import DecoupledDecay
from tests.helpers import ROOT
from tests.helpers.matrices import matrix, set_gradients

BUILDS = pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR])


pytestmark = pytest.mark.filterwarnings("ignore:params. no parameter to orthogonalize")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def steps(optimizer: Any, count: int = 3) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(count):
        set_gradients(params, t)
        optimizer.step()


# Memory


@pytest.mark.parametrize(
    "attach",
    [
        lambda m: AdamCPR(m, lr=0.1),
        lambda m: DecoupledDecay(m, 0.1).attach(torch.optim.Adam(m.parameters())),
    ],
)
def test_an_optimizer_is_freed_with_its_last_reference(attach: Any) -> None:
    m = model()
    optimizer = attach(m)
    steps(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    del scheduler
    moments = [
        weakref.ref(v)
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    while gc.collect():  # garbage of other tests may take several collections
        pass
    gc.disable()
    try:
        assert gc.get_referrers(optimizer) == []
        alive = weakref.ref(optimizer)
        del optimizer
        assert alive() is None and all(moment() is None for moment in moments) and moments
        assert gc.collect() == 0
    finally:
        gc.enable()


# Parameters


@BUILDS
def test_named_parameters_are_in_the_groups(build: type) -> None:
    m = model()
    names = [name for name, _ in m.named_parameters()]
    for params in (m, m.named_parameters(), [{"params": m.named_parameters()}]):
        optimizer = build(params)
        assert optimizer.param_groups[0]["param_names"] == names
        assert optimizer.cpr.names == ["0.weight", "1.weight"]
    assert "param_names" not in build(m.parameters()).param_groups[0]


@BUILDS
def test_the_default_dtype_does_not_matter(build: type) -> None:
    results = []
    for default in (torch.float32, torch.bfloat16):
        p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 3))
        torch.set_default_dtype(default)
        try:
            groups = [{"params": [p], "kappa": "k0p5"}, {"params": [q], "regularizer": "l1"}]
            optimizer = build(groups, lr=0.1)
            steps(optimizer)
            steps(build([p, q], lr=0.1))
            assert optimizer.cpr.measure.dtype is torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((p, q))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_the_default_device_does_not_matter(build: type, fused: bool | None) -> None:
    m = model()
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    torch.set_default_device("meta")
    try:
        optimizer = build(m, lr=0.1, fused=fused)
        for _ in range(3):
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(p.isfinite().all() for p in m.parameters())


# Arguments


@BUILDS
@pytest.mark.filterwarnings("error")
def test_weight_decay_is_refused_in_one_line(build: type) -> None:
    with pytest.raises(TypeError, match="CPR: expected 0, since CPR replaces it"):
        build([matrix()], weight_decay=1e-2)
    build([matrix()], weight_decay=0)


# Deviations (docs/reference/deviations-from-torch.md)

TORCHS = [
    pytest.param(SGDCPR, partial(torch.optim.SGD, momentum=0.99, nesterov=True), id="SGD"),
    pytest.param(AdamCPR, torch.optim.Adam, id="Adam"),
]


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
@pytest.mark.parametrize(
    ("parameter", "gradient"),
    [
        (lambda t: t.repeat_interleave(2, 1)[:, ::2], lambda t: t),
        (lambda t: t, lambda t: t.T.contiguous().T),
        (lambda t: t, lambda t: t.to_sparse()),
    ],
)
def test_fused_step_of_unlike_gradients_is_torchs_unfused_step(
    ours: Any, torchs: Any, parameter: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    results = []
    for build in (partial(ours, fused=True), partial(torchs, fused=False)):
        torch.manual_seed(0)
        p = nn.Parameter(parameter(torch.randn(4, 3)))
        given = gradient(torch.randn(4, 3))
        p.grad = given if given.is_sparse else torch.ones_like(p)
        p.grad.data = given  # of any dtype and shape
        try:
            build([p], lr=0.1).step()
            results.append(p.detach())
            assert p.grad.layout == given.layout
            assert p.grad.is_sparse or p.grad.stride() == given.stride()
        except RuntimeError as error:
            results.append(type(error))
    if isinstance(results[1], type):
        assert results[0] is results[1]
    else:
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("ours", [SGDCPR, AdamCPR])
@pytest.mark.parametrize(
    "gradient", [lambda t: t[0].clone(), lambda t: t[:, :2].clone(), lambda t: t.double()]
)
def test_gradients_of_another_shape_or_dtype_are_refused(ours: Any, gradient: Any) -> None:
    p = matrix()
    p.grad = torch.ones_like(p)
    p.grad.data = gradient(p.grad)
    optimizer = ours([("w", p)], lr=0.1)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'w': expected .*, got .*; cast"):
        optimizer.step()
    assert torch.equal(p, before) and not optimizer.state and optimizer.cpr.step_count == 0


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_twice_in_a_group_is_stepped_twice(ours: Any, torchs: Any) -> None:
    results = []
    for build in (ours, partial(torchs, fused=True)):
        p = matrix()
        optimizer = build([p, p], lr=0.1)
        if ours is SGDCPR and build is not ours:
            optimizer.step()  # the gradient is 0
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.add_param_group({"params": [matrix()]}), "group 3: .* got a new group"),
        (lambda o: o.param_groups.pop(1), "group 1: .* got .*ws1000"),
        (lambda o: o.param_groups[0]["params"].pop(), "the optimizer does not have '0.0'"),
        (lambda o: o.param_groups.reverse(), "the order at construction, got '2.0' in place of '0.0'"),
        (lambda o: o.param_groups[0].update(weight_decay=-0.1), "applies weight decay to '0.0'"),
        (lambda o: o.param_groups[1].update(weight_decay=0.1), None),  # nothing regularized
    ],
)
def test_groups_changed_after_construction_are_refused_at_the_step(
    build: type, change: Callable[[Any], Any], message: str | None
) -> None:
    optimizer: Any = build(
        [
            {"params": [matrix()]},
            {"params": [nn.Parameter(torch.ones(3))], "kappa": "k2"},
            {"params": [matrix()]},
        ]
    )
    steps(optimizer)
    change(optimizer)
    if message is None:
        steps(optimizer)
        return
    with pytest.raises(ValueError, match=message):
        steps(optimizer)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR, CPR, DecoupledDecay])
@pytest.mark.parametrize("decay", [-0.1, torch.tensor(-0.1), torch.ones(2), float("nan")])
def test_wrong_decay_of_a_group_is_refused(build: type, decay: Any) -> None:
    with pytest.raises(ValueError, match=r"weight_decay of a parameter group: .* got (-0|nan|tensor)"):
        build([{"params": [matrix()], "weight_decay": decay}])
    build([{"params": [matrix()], "weight_decay": torch.tensor(0.1)}])


@BUILDS
def test_arguments_of_torch_that_are_missing_are_refused(build: type) -> None:
    for name in ("foreach", "differentiable", "dampening"):
        with pytest.raises(TypeError, match=name):
            build([matrix()], **{name: 0.1})


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
def test_foreach_of_a_group_is_kept(ours: Any, torchs: Any) -> None:
    results = []
    for build in (ours, torchs):
        p = matrix()
        optimizer = build([{"params": [p], "foreach": True, "differentiable": False}], lr=0.1)
        assert optimizer.param_groups[0]["foreach"] is True
        steps(optimizer)
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
def test_defaults_are_torchs_but_for_the_momentum(ours: Any, torchs: Any) -> None:
    own, of_torch = ours([matrix()]).param_groups[0], torchs([matrix()]).param_groups[0]
    assert {key: own[key] for key in of_torch.keys() - {"params", "fused"}} == {
        key: of_torch[key] for key in of_torch.keys() - {"params", "fused"}
    }


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_loaded_state_is_copied(build: type) -> None:
    first, second = build([matrix()], lr=0.1), build([matrix()], lr=0.1)
    steps(first)
    saved = first.state_dict()
    second.load_state_dict(saved)
    before = {key: value.clone() for key, value in saved["state"][0].items()}
    steps(second)
    torch.testing.assert_close(saved["state"][0], before, rtol=0, atol=0)


@BUILDS
def test_lazy_parameters_are_refused_before_their_first_forward(build: type) -> None:
    m = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="uninitialized"):
        build(m)
    m(torch.ones(1, 4))
    steps(build(m))


@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
def test_gradient_in_the_memory_of_another_parameter_is_its_value_before_or_after(
    ours: Any, torchs: Any
) -> None:
    def stepped(build: Any, order: list[int]) -> list[Tensor]:
        params = [matrix(), matrix()]
        params[0].grad, params[1].grad = params[1].detach(), torch.ones_like(params[1])
        build([params[i] for i in order], lr=0.1).step()
        return [p.detach() for p in params]

    expected = [stepped(torchs, order) for order in ([0, 1], [1, 0])]
    found = stepped(ours, [0, 1])
    assert any(all(map(torch.allclose, found, each)) for each in expected)


DEVIATIONS = {
    "`weight_decay=0.1`": "cpr.test_torch_conventions.test_weight_decay_is_refused_in_one_line",
    "`weight_decay` of a group": "cpr.test_regularized_parameters.test_groups_can_be_excluded",
    "weight decay of regularized parameters, `kappa` and the like set after construction": (
        "cpr.test_attachment.test_later_settings_are_refused"
    ),
    "`foreach`, `differentiable`, `dampening`": (
        "cpr.test_torch_conventions.test_arguments_of_torch_that_are_missing_are_refused"
    ),
    "`fused=None`": "integrations.test_torch_optimizers.test_fused_steps_are_the_default",
    "`fused=True` on the CPU, parameter and gradient with gaps or other strides": (
        "cpr.test_torch_conventions.test_fused_step_of_unlike_gradients_is_torchs_unfused_step"
    ),
    "`fused=True`, sparse gradients of SGD": (
        "integrations.test_torch_optimizers.test_sparse_gradients_equal_dense_ones"
    ),
    "state or gradient of another dtype, shape or device than the parameter": (
        "optimizers.fused.test_changed_memory.test_changed_tensors_give_torchs_step_or_an_error"
    ),
    "complex parameters": "cpr.test_regularized_parameters.test_invalid_params_are_refused",
    "`copy.deepcopy`, `pickle`": (
        "cpr.test_attachment.test_optimizers_with_attachment_refuse_to_be_copied"
    ),
    "unknown key in a group": "cpr.test_group_settings.test_unknown_group_key_is_refused",
    "nothing to regularize": "cpr.test_regularized_parameters.test_nothing_to_regularize_is_a_warning",
    "`params`": "cpr.test_torch_conventions.test_named_parameters_are_in_the_groups",
    "defaults of `SGDCPR`": ("cpr.test_torch_conventions.test_defaults_are_torchs_but_for_the_momentum"),
    "parameter groups": "cpr.test_group_settings.test_groups_train_like_optimizers_of_their_own",
    "`state_dict()`": "cpr.test_attachment.test_torchs_optimizer_ignores_the_state_of_cpr",
    "state saved without CPR, or by another optimizer": (
        "cpr.test_attachment.test_a_state_saved_without_cpr_is_refused"
    ),
    "loaded state": "cpr.test_torch_conventions.test_loaded_state_is_copied",
    "loaded state with the named parameters of each group in another order": (
        "cpr.test_loading_order.test_state_is_loaded_by_name"
    ),
    "`GradScaler`": (
        "integrations.test_torch_optimizers.test_gradient_scaling_is_announced_for_explicit_fused_steps"
    ),
    "a loaded state with another `fused`": (
        "optimizers.fused.test_gradient_scaler.test_state_of_an_unfused_optimizer_does_not_switch_the_skipping_off"
    ),
    "one parameter twice in a group": (
        "cpr.test_torch_conventions.test_parameter_twice_in_a_group_is_stepped_twice"
    ),
    "a gradient in the memory of another parameter": (
        "cpr.test_torch_conventions"
        ".test_gradient_in_the_memory_of_another_parameter_is_its_value_before_or_after"
    ),
    "a negative number as `weight_decay` in a group given at construction": (
        "cpr.test_torch_conventions.test_wrong_decay_of_a_group_is_refused"
    ),
    "`nn.LazyLinear` and the like before their first forward": (
        "cpr.test_torch_conventions.test_lazy_parameters_are_refused_before_their_first_forward"
    ),
    "groups added or removed, regularized parameters removed, or groups reordered after construction": (
        "cpr.test_torch_conventions.test_groups_changed_after_construction_are_refused_at_the_step"
    ),
    "regularized parameters on the meta device": (
        "cpr.test_attachment.test_an_optimizer_of_a_meta_model_refuses_to_step"
    ),
    "`torch.compile` of the step": "cpr.test_compiled_steps.test_compiled_steps_are_the_eager_ones",
}
"""Test of each row of the page of deviations."""


def test_every_row_of_the_page_has_a_test() -> None:
    text = (ROOT / "docs" / "reference" / "deviations-from-torch.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(DEVIATIONS)
    for test in DEVIATIONS.values():
        module, _, name = test.rpartition(".")
        assert hasattr(importlib.import_module(f"tests.{module}"), name), test
