"""Methods attached to optimizers run once in a step, whatever classes have been used before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from nnunet_cpr import CPR, SGDCPR, AdamCPR, MuonCPR
from nnunet_cpr.baselines import CautiousDecay, DecoupledDecay, Hyperball
from nnunet_cpr.optimizers import FusedSGD
from tests.helpers.matrices import matrix, set_gradients


def inherited(base: type) -> type:
    """Return a subclass whose step calls the step of its base."""

    class Inherited(base):  # type: ignore[valid-type,misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            return super().step(closure)

    return Inherited


@pytest.fixture
def hooked_bases() -> None:
    """Torch puts hooks around the step of a class when it is built for the first time."""
    for build in (SGD, SGDCPR, AdamCPR, MuonCPR):
        build([nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))])


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("base", [SGD, SGDCPR, AdamCPR, MuonCPR])
@pytest.mark.usefixtures("hooked_bases")
@pytest.mark.filterwarnings("ignore:params. no parameter to orthogonalize")
def test_inherited_steps_regularize_once(base: type, depth: int, with_closure: bool) -> None:
    cls = base
    for _ in range(depth):
        cls = inherited(cls)
        cls([matrix()])
    p = matrix()
    optimizer: Any = cls([p], lr=0.1)
    cpr = CPR([p]) if base is SGD else optimizer.cpr
    if base is SGD:
        cpr.attach(optimizer)
    for t in range(3):
        set_gradients([p], t)
        optimizer.step(*([lambda: torch.ones(())] if with_closure else []))
        assert cpr.step_count == t + 1


@pytest.mark.parametrize("method", [DecoupledDecay, CautiousDecay])
@pytest.mark.usefixtures("hooked_bases")
def test_inherited_steps_decay_once(method: type) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = method([("w", p)], 1.0).attach(inherited(SGD)([p], lr=0.1))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.9))


@pytest.mark.usefixtures("hooked_bases")
def test_step_after_one_that_raises_is_regularized() -> None:
    p = matrix()
    cpr = CPR([p])
    optimizer = cpr.attach(inherited(SGD)([p], lr=0.1))
    set_gradients([p], 0)

    def fail() -> None:
        raise KeyError("loss")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert cpr.step_count == 0
    optimizer.step()
    assert cpr.step_count == 1


@pytest.mark.usefixtures("hooked_bases")
def test_step_that_steps_twice_is_regularized_once() -> None:
    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups
            self.param_groups = list(group)  # as code that steps one group after another
            super().step()
            super().step()
            self.param_groups = group

    p = matrix()
    cpr = CPR([p])
    optimizer = cpr.attach(Twice([p], lr=0.1))
    for t in range(3):
        set_gradients([p], t)
        optimizer.step()
        assert cpr.step_count == t + 1


def test_method_finishes_after_the_whole_step_of_a_subclass() -> None:
    class Extra(FusedSGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            p.data.mul_(3)
            return loss

    p = nn.Parameter(torch.arange(1.0, 13.0).view(4, 3))
    optimizer = Hyperball([("w", p)]).attach(Extra([("w", p)], lr=0.1, momentum=0.9))
    norm = p.detach().norm()
    for t in range(2):
        set_gradients([p], t)
        optimizer.step()
        torch.testing.assert_close(p.detach().norm(), norm)


class SAM(torch.optim.Optimizer):
    """The common implementation of sharpness-aware minimization, whose base shares its groups."""

    def __init__(self, params: Any, base: type, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups


class Averaging(torch.optim.Optimizer):
    """Wrapper that shares state and groups with the wrapped optimizer, and loads them itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.state, self.inner.param_groups = self.state, self.param_groups


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR, None])
def test_wrapper_that_loads_without_cpr_is_refused_at_the_next_step(build: Any) -> None:
    def start() -> tuple[torch.nn.Parameter, Averaging, CPR]:
        p = matrix()
        if build is not None:
            optimizer = build([p], lr=0.1, kappa="ws1")
            return p, Averaging(optimizer), optimizer.cpr
        optimizer, cpr = SGD([p], lr=0.1), CPR([p], kappa="ws1")
        return p, Averaging(cpr.attach(optimizer)), cpr

    def step(p: torch.nn.Parameter, wrapper: Averaging) -> None:
        p.grad = torch.full_like(p, 0.1)
        wrapper.step()

    p, wrapper, cpr = start()
    for _ in range(3):
        step(p, wrapper)
    states = wrapper.state_dict(), cpr.state_dict()
    step(p, wrapper)
    q, other, other_cpr = start()
    other.load_state_dict(states[0])
    with pytest.raises(RuntimeError, match=r"replaced after CPR .*; save its state_dict\(\) beside"):
        step(q, other)
    other_cpr.load_state_dict(states[1])
    step(q, other)
    assert other_cpr.step_count == cpr.step_count == 4


def test_momenta_may_be_reset_by_an_empty_state() -> None:
    p = matrix()
    optimizer = AdamCPR([p], lr=0.1)
    for _ in range(2):
        p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        optimizer.state = defaultdict(dict)
    assert optimizer.cpr.step_count == 2


class OutOfMemory:
    """Optimizer whose step raises after the correction, as for lack of memory for its state."""

    failures = 0

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory for the state")
        return super()._init_group(*args, **kwargs)  # type: ignore[misc]


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("loads", [False, True])
def test_step_that_raises_and_is_repeated_counts_once(is_attached: bool, loads: bool) -> None:
    def trained(failures: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        p = matrix()
        if is_attached:
            kind = type("Failing", (OutOfMemory, SGD), {})
            optimizer = kind([("w", p)], lr=0.1, momentum=0.9)
            cpr = CPR([("w", p)], kappa="ki0x0p9")
            cpr.attach(optimizer)
        else:
            kind = type("Failing", (OutOfMemory, AdamCPR), {})
            optimizer = kind([("w", p)], lr=0.1, kappa="ki0x0p9", fused=False)
            cpr = optimizer.cpr
        state, start = optimizer.state_dict(), p.detach().clone()
        for step in range(3):
            optimizer.failures = failures if step == 0 else 0
            p.grad = torch.full_like(p, 0.1)
            for _ in range(optimizer.failures):
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
                if loads:  # a checkpoint of before the step
                    optimizer.load_state_dict(state)
                    p.data.copy_(start)
            optimizer.step()
        return cpr.step_count, cpr.lagrange_multiplier, p.detach()

    expected = trained(0)
    for failures in (1, 3):
        torch.testing.assert_close(trained(failures), expected, rtol=0, atol=0)


def test_correction_of_a_step_that_raised_stands_for_a_fused_one() -> None:
    def trained(failures: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        p = matrix()
        optimizer = type("Failing", (OutOfMemory, AdamCPR), {})([p], lr=0.1, kappa="ki0x0p9")
        find, optimizer.failures = optimizer._find_kernel, failures
        p.grad = torch.full_like(p, 0.1)
        for _ in range(failures):
            optimizer._find_kernel = lambda device: None
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        optimizer._find_kernel = find
        optimizer.step()
        return optimizer.cpr.step_count, optimizer.cpr.lagrange_multiplier, p.detach()

    torch.testing.assert_close(trained(1), trained(0))


def test_wrapper_of_an_optimizer_is_refused() -> None:
    p = matrix()
    sam = SAM([p], SGD, lr=0.1)
    with pytest.raises(TypeError, match="got a SAM around a SGD; attach to its base_optimizer"):
        CPR([p]).attach(sam)
    CPR([p]).attach(sam.base_optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mu", 100), ("adaptive", True), ("bound", "ws5"), ("regularizer", "l1"), ("kappa", 1)],
)
def test_settings_cannot_be_changed_after_construction(name: str, value: Any) -> None:
    cpr = CPR([matrix()])
    with pytest.raises(AttributeError, match=f"{name} of CPR: .* got .*; build a new CPR"):
        setattr(cpr, name, value)
