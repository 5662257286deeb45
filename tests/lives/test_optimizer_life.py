"""Any life of an optimizer with CPR, played by a state machine against the float64 oracle.

The oracle keeps the parameters, momenta, bounds and multipliers in NumPy. After every step the optimizer
has the same; whatever it refuses is refused in one line, and changes nothing.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from timm.optim import Lion
from torch import nn

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.optimizers import Muon
from nnunet_cpr.optimizers.groups import keep_fused
from tests.helpers import examples
from tests.helpers.oracle import OracleAdam, OracleCPR, OracleLion, OracleMuon, OracleSGD

SHAPES = {"a": (6, 5), "b": (3, 4, 2, 2), "c": (4, 3), "bias": (6,)}
LR, MOMENTUM, BETAS, EPS = 0.01, 0.9, (0.9, 0.99), 1e-7
BOUNDS = {
    "k": (lambda kind: KappaK(LIMITS[kind]), lambda kind: ("k", LIMITS[kind])),
    "ki0": (lambda kind: KappaKI0(0.9), lambda kind: ("ki0", 0.9)),
    "ws": (lambda kind: KappaWS(2), lambda kind: ("ws", 2)),
    "ip": (lambda kind: KappaIP(2), lambda kind: ("ip", 2, 0.0)),
}
LIMITS = {"l2": 0.02, "l1": 0.1, "std": 0.15, "huber": 0.01}
MU = {"l2": 0.5, "l1": 1e-3, "std": 2.0, "huber": 0.5}
OF_OWN_GROUP = "c"
"""The matrix whose parameter group may have settings of its own."""

Groups = list[dict[str, Any]]


class CallingSGD(torch.optim.SGD):
    """A subclass as many libraries have one."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallingSGDCPR(SGDCPR):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallingMuonCPR(MuonCPR):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@dataclass
class MuonAndAdam:
    """Oracle of Muon, which takes Adam's step for the bias."""

    muon: OracleMuon = field(default_factory=lambda: OracleMuon(LR, MOMENTUM))
    adam: OracleAdam = field(default_factory=lambda: OracleAdam(LR, BETAS, EPS))

    def move(self, name: str, g: np.ndarray) -> np.ndarray:
        return (self.adam if name in ("bias", "late") else self.muon).move(name, g)

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "lr":
            self.muon.lr = self.adam.lr = value
        else:
            super().__setattr__(key, value)


@dataclass(frozen=True)
class Kind:
    """An optimizer, with CPR built in or attached, and its oracle."""

    build: Callable[[Groups], torch.optim.Optimizer]
    oracle: Callable[[], Any]
    dtype: torch.dtype = torch.float64
    is_attached: bool = False
    others: tuple[str, ...] = ()
    """Kinds that load the state of this one: other ways to take the same steps."""


def _sgd(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda groups, **cpr: cls(groups, lr=LR, momentum=MOMENTUM, nesterov=True, **options, **cpr)


def _adam(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda groups, **cpr: cls(groups, lr=LR, betas=BETAS, eps=EPS, **options, **cpr)


def _muon(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[..., torch.optim.Optimizer]:
    options |= {"ns_dtype": "float64", "adamw_for": (), "eps": EPS, "nesterov": False}
    return lambda groups, **cpr: cls(groups, lr=LR, momentum=MOMENTUM, betas=BETAS, **options, **cpr)


def _torchs(cls: Any) -> Any:
    # Torch's fused steps on the CPU are wrong where gradients have other strides than parameters, and a
    # loaded state could turn them on.
    return lambda groups, **options: keep_fused(cls(groups, **options))


def _oracle_sgd() -> OracleSGD:
    return OracleSGD(LR, MOMENTUM)


def _oracle_adam() -> OracleAdam:
    return OracleAdam(LR, BETAS, EPS)


KINDS = {
    "SGDCPR": Kind(_sgd(SGDCPR), _oracle_sgd, torch.float32, others=("SGD", "SGDCPR scaled")),
    "SGDCPR scaled": Kind(_sgd(SGDCPR, fused=True), _oracle_sgd, torch.float32, others=("SGDCPR",)),
    "SGDCPR unfused": Kind(_sgd(SGDCPR, fused=False), _oracle_sgd, others=("SGD", "SGDCPR")),
    "SGDCPR subclass": Kind(_sgd(CallingSGDCPR), _oracle_sgd, torch.float32),
    "AdamCPR": Kind(_adam(AdamCPR), _oracle_adam, torch.float32, others=("Adam", "AdamCPR unfused")),
    "AdamCPR scaled": Kind(_adam(AdamCPR, fused=True), _oracle_adam, torch.float32, others=("AdamCPR",)),
    "AdamCPR unfused": Kind(_adam(AdamCPR, fused=False), _oracle_adam, others=("AdamCPR", "Adam")),
    "MuonCPR": Kind(_muon(MuonCPR), MuonAndAdam, others=("Muon",)),
    "MuonCPR subclass": Kind(_muon(CallingMuonCPR), MuonAndAdam),
    "SGD": Kind(
        _sgd(_torchs(torch.optim.SGD)), _oracle_sgd, is_attached=True, others=("SGDCPR unfused",)
    ),
    "SGD subclass": Kind(_sgd(CallingSGD), _oracle_sgd, is_attached=True),
    "Adam": Kind(
        _adam(_torchs(torch.optim.Adam)), _oracle_adam, is_attached=True, others=("AdamCPR unfused",)
    ),
    "AdamW": Kind(_adam(torch.optim.AdamW, weight_decay=0), _oracle_adam, is_attached=True),
    "Muon": Kind(_muon(Muon), MuonAndAdam, is_attached=True, others=("MuonCPR",)),
    "Lion": Kind(
        lambda groups: Lion(groups, lr=LR, betas=BETAS), lambda: OracleLion(LR, BETAS), is_attached=True
    ),
}

seeds = st.integers(0, 2**16)
some = st.sampled_from(sorted(SHAPES))


class OptimizerLife(RuleBasedStateMachine):
    """One optimizer and the oracle."""

    kind: Kind
    seen: Counter[str]

    @initialize(
        bounds=st.lists(st.sampled_from(sorted(BOUNDS)), min_size=2, max_size=2),
        regularizers=st.lists(st.sampled_from(sorted(MU)), min_size=2, max_size=2),
        adaptive=st.lists(st.booleans(), min_size=2, max_size=2),
        has_own_settings=st.booleans(),
        maximizes=st.booleans(),
        is_named=st.booleans(),
        seed=seeds,
    )
    def build(
        self,
        bounds: list[str],
        regularizers: list[str],
        adaptive: list[bool],
        has_own_settings: bool,
        maximizes: bool,
        is_named: bool,
        seed: int,
    ) -> None:
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # torch changes its class at the first one
        self.settings, self.cpr_oracles = [], []
        for bound, regularizer, adapts in zip(bounds, regularizers, adaptive):
            ours, theirs = BOUNDS[bound]
            own = {"regularizer": regularizer, "mu": MU[regularizer], "adaptive": adapts}
            self.cpr_oracles.append(OracleCPR(theirs(regularizer), **own))
            self.settings.append({"kappa": ours(regularizer), **own})
        self.has_own_settings, self.is_named = has_own_settings, is_named
        self.oracle = self.kind.oracle()
        rng = np.random.default_rng(seed)
        self.values = {
            name: rng.normal(0, 0.2, shape).astype(np.float32).astype(np.float64)
            for name, shape in SHAPES.items()
        }
        self.params = self.copied_parameters()
        self.maximized = {OF_OWN_GROUP} if maximizes else set()
        self.frozen: set[str] = set()
        self.late_is_appended = False
        self.is_detached = False
        self.steps = 0
        refusal = None
        try:
            self.optimizer = self.built(self.params)
        except TypeError as error:
            refusal = str(error)
            self.maximized = set()
            self.optimizer = self.built(self.params)
        assert refusal is None or (maximizes and "maximize" in refusal)
        self.method: Any = attached_method(self.optimizer)
        self.lr = LR

    # Building

    def copied_parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(torch.from_numpy(x).to(self.kind.dtype, copy=True))
            for name, x in self.values.items()
        }

    def built(self, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        own = {OF_OWN_GROUP} if self.has_own_settings or self.maximized else set()
        named = [(name, p) for name, p in params.items() if name != "late"]
        groups: Groups = [{"params": [pair for pair in named if pair[0] not in own]}]
        if own:
            groups.append({"params": [pair for pair in named if pair[0] in own]})
        if not self.is_named:
            groups = [{"params": [p for _, p in group["params"]]} for group in groups]
        with_settings = [dict(group) for group in groups]
        if self.has_own_settings:
            with_settings[1].update(self.settings[1])
        if self.maximized:
            for both in (groups, with_settings):
                both[1]["maximize"] = True
        if not self.kind.is_attached:
            return self.kind.build(with_settings, **self.settings[0])
        method = CPR(with_settings, **self.settings[0])
        return method.attach(self.kind.build(groups))

    def append_late(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        """Append a parameter to the first group, as code does that unfreezes layers."""
        group = optimizer.param_groups[0]
        group["params"].append(p)
        if "param_names" in group:
            group["param_names"].append("late")

    def is_alone(self, name: str) -> bool:
        """Return True for the matrix with settings of its own."""
        return self.has_own_settings and name == OF_OWN_GROUP

    # Steps

    def gradient(self, name: str, x: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng([self.steps, *map(ord, name)])
        sign = -1 if name in self.maximized else 1
        x = np.where(np.isfinite(x), x, 0.0)
        return sign * (0.1 * (x - 0.5) + noise.normal(0, 0.2, x.shape))

    def set_gradients(self, absent: str | None, scale: float = 1.0) -> None:
        for name, p in self.params.items():
            g = self.gradient(name, p.detach().double().numpy())
            has_none = name == absent or name in self.frozen
            p.grad = None if has_none else torch.from_numpy(g * scale).to(p.dtype)

    def step_oracle(self, absent: str | None = None) -> None:
        values, left_out = self.values, {absent, *self.frozen}
        correction: dict[str, np.ndarray] = {}
        if not self.is_detached:
            for k, oracle in enumerate(self.cpr_oracles):
                # A matrix that is not finite takes no part in the step.
                matrices = {
                    name: x
                    for name, x in values.items()
                    if name in "abc" and self.is_alone(name) is (k == 1) and np.isfinite(x).all()
                }
                with_step = {name: name not in left_out for name in matrices}
                correction |= oracle.correction(matrices, with_step)
        for name, x in values.items():
            if name not in left_out:
                g = self.gradient(name, x) * (-1 if name in self.maximized else 1)
                values[name] = x + self.oracle.move(name, g) - correction.get(name, 0.0)
        self.steps += 1
        self.seen["corrected"] += any(lam > 0 for own in self.cpr_oracles for lam in own.lam.values())
        self.compare()

    def compare(self) -> None:
        for name, p in self.params.items():
            np.testing.assert_allclose(
                p.detach().double().numpy(), self.values[name], rtol=1e-4, atol=2e-5, err_msg=name
            )
        if not self.steps:
            return
        assert self.method.step_count == self.cpr_oracles[0].t
        name_of = {id(p): name for name, p in self.params.items()}
        names = [name_of[id(p)] for p in self.method.parameters]
        assert sorted(names) == ["a", "b", "c"]
        oracles = [self.cpr_oracles[self.is_alone(name)] for name in names]
        kappa = [oracle.kappa.get(name, np.inf) for oracle, name in zip(oracles, names)]
        multiplier = [oracle.lam.get(name, 0.0) for oracle, name in zip(oracles, names)]
        np.testing.assert_allclose(self.method.kappa.numpy(), kappa, rtol=1e-4)
        np.testing.assert_allclose(
            self.method.lagrange_multiplier.numpy(), multiplier, rtol=1e-2, atol=1e-4
        )

    @rule(absent=st.sampled_from(["none", *SHAPES]))
    def step(self, absent: str) -> None:
        self.set_gradients(absent)
        self.optimizer.step()
        self.step_oracle(absent)

    @rule()
    def step_with_closure(self) -> None:
        def closure() -> torch.Tensor:
            self.set_gradients(None)
            return torch.tensor(3.0)

        loss = self.optimizer.step(closure)
        assert loss is not None and loss.item() == 3.0
        self.step_oracle()

    @rule(overflows=st.booleans())
    def step_of_scaler(self, overflows: bool) -> None:
        trained = [name for name in self.params if name not in self.frozen]
        if not trained:  # of which GradScaler would complain
            return
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # else it has no scale yet
        self.set_gradients(None, scale=4.0)
        if overflows:
            grad = self.params[trained[0]].grad
            grad[(0,) * grad.ndim] = torch.inf
        scaler.step(self.optimizer)
        if overflows:
            self.compare()
        else:
            self.step_oracle()

    @rule(absent=st.sampled_from(["none", *SHAPES]))
    def step_that_raises_and_is_repeated(self, absent: str) -> None:
        """Lack the memory for the state amid a step, where an optimizer creates any."""

        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError

        self.set_gradients(absent)
        self.optimizer._init_group = fail
        try:
            self.optimizer.step()
        except MemoryError:
            self.seen["raised"] += 1
            del self.optimizer._init_group
            self.optimizer.step()
        else:
            del self.optimizer._init_group
        self.step_oracle(absent)

    # What others do to an optimizer and its parameters

    @rule(name=some)
    def freeze_or_unfreeze(self, name: str) -> None:
        if name not in self.params:
            return
        self.frozen ^= {name}
        self.params[name].requires_grad_(name not in self.frozen)

    @precondition(lambda self: self.steps > 2)
    @rule(name=st.sampled_from(["a", "b", "c"]), sign=st.sampled_from([-1, 1]))
    def one_element_becomes_infinite(self, name: str, sign: int) -> None:
        with torch.no_grad():
            self.params[name][(0,) * self.params[name].ndim] = sign * torch.inf
        self.values[name] = self.values[name].copy()
        self.values[name][(0,) * self.values[name].ndim] = sign * np.inf

    @precondition(lambda self: "late" not in self.params)
    @rule(seed=seeds)
    def append_to_a_group(self, seed: int) -> None:
        late = np.random.default_rng(seed).normal(0, 0.2, 5).astype(np.float32).astype(np.float64)
        p = nn.Parameter(torch.from_numpy(late).to(self.kind.dtype, copy=True))
        self.append_late(self.optimizer, p)
        self.params["late"], self.values["late"], self.late_is_appended = p, late, True

    @precondition(lambda self: "bias" in self.params)
    @rule()
    def drop_from_a_group(self) -> None:
        """Drop a parameter that CPR does not have; one that it has is refused at the next step."""
        bias = self.params["bias"]
        for group in self.optimizer.param_groups:
            keep = [k for k, p in enumerate(group["params"]) if p is not bias]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][k] for k in keep]
        self.optimizer.state.pop(bias, None)
        del self.params["bias"], self.values["bias"]
        self.frozen.discard("bias")

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def schedule_sets_the_learning_rate(self, factor: float) -> None:
        self.lr = min(max(self.lr * factor, LR / 4), 2 * LR)
        self.oracle.lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    @precondition(lambda self: hasattr(self.oracle, "momentum"))
    @rule(momentum=st.sampled_from([0.5, 0.8, 0.95]))
    def schedule_sets_the_momentum(self, momentum: float) -> None:
        self.oracle.momentum = momentum
        for group in self.optimizer.param_groups:
            group["momentum"] = momentum

    @rule(
        name=some.filter(lambda name: name != "bias"),
        way=st.sampled_from(["copy_", "data", "new data", "numpy", "layout"]),
        part=st.sampled_from(["all", "first row", "one element"]),
        seed=seeds,
    )
    def write(self, name: str, way: str, part: str, seed: int) -> None:
        """Write values as loops, libraries and averages of weights do."""
        p, x = self.params[name], self.values[name]
        new = np.random.default_rng(seed).normal(0, 0.3, x.shape).astype(np.float32).astype(np.float64)
        old = p.detach().double().numpy().copy()
        if part == "first row":
            new[1:] = old[1:]
        elif part == "one element":
            new.reshape(-1)[1:] = old.reshape(-1)[1:]
        tensor = torch.from_numpy(new).to(p.dtype)
        if way == "copy_":
            with torch.no_grad():
                p.copy_(tensor)
        elif way == "data":
            p.data.copy_(tensor)
        elif way == "numpy":
            p.detach().numpy()[...] = new
        elif way == "layout" and p.ndim == 4:
            p.data = tensor.to(memory_format=torch.channels_last)
        else:
            p.data = tensor.clone()
        self.values[name] = np.where(new == old, x, new)

    @precondition(lambda self: self.kind.dtype == torch.float32 and self.steps)
    @rule()
    def cast_and_step(self) -> None:
        """Cast a model between steps: a step is refused before anything moves, or is like any other."""
        for p in self.params.values():
            p.data = p.data.double()
            p.grad = None
        before, refusal = self.snapshot(), None
        self.set_gradients(None)
        try:
            self.optimizer.step()
        except (RuntimeError, ValueError, TypeError) as error:
            refusal = str(error)
        if refusal is not None:
            assert "\n" not in refusal
            assert self.snapshot() == before, "something has moved before the error"
        for p in self.params.values():
            p.data = p.data.float()
            p.grad = None
        if refusal is None:
            self.step_oracle()

    def snapshot(self) -> bytes:
        """Return everything that a step may change."""
        file = io.BytesIO()
        saved = self.optimizer.state_dict()
        torch.save([[p.detach().clone() for p in self.params.values()], saved], file)
        return file.getvalue()

    @rule(way=st.sampled_from([copy.deepcopy, pickle.dumps]))
    def copy_is_refused(self, way: Callable[[Any], Any]) -> None:
        if not self.is_detached:
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                way(self.optimizer)

    @precondition(lambda self: self.kind.is_attached)
    @rule()
    def detach_or_attach(self) -> None:
        if self.is_detached:
            self.method.attach(self.optimizer)
        else:
            self.method.detach()
        self.is_detached = not self.is_detached

    @precondition(lambda self: "late" not in self.params)
    @rule(seed=seeds)
    def add_a_group(self, seed: int) -> None:
        """Add a parameter that CPR does not have; optimizers with CPR built in refuse it."""
        late = np.random.default_rng(seed).normal(0, 0.2, 5).astype(np.float32).astype(np.float64)
        p = nn.Parameter(torch.from_numpy(late).to(self.kind.dtype, copy=True))
        self.optimizer.add_param_group({"params": [("late", p) if self.is_named else p]})
        if self.kind.is_attached:
            self.params["late"], self.values["late"] = p, late
            first, group = self.optimizer.param_groups[0], self.optimizer.param_groups[-1]
            group.update({key: first[key] for key in ("lr", "momentum") if key in first})
            return
        before = self.snapshot()
        self.set_gradients(None)
        with pytest.raises(ValueError, match="got a new group"):
            self.optimizer.step()
        assert self.snapshot() == before
        del self.optimizer.param_groups[-1]

    # Saving and loading

    @precondition(lambda self: not self.is_detached)
    @rule(order=st.sampled_from(["same", "reversed", "exchanged"]), way=st.integers(0, 2))
    def continue_in_a_new_process(self, order: str, way: int) -> None:
        """Load the state into a new optimizer, perhaps of another kind; a wrong one is refused."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        first = [name for name in self.params if name != "late"]
        late = [name for name in self.params if name == "late"]
        if order == "reversed":
            first.reverse()
        elif order == "exchanged":
            first[:2] = first[1], first[0]
        fresh = {name: nn.Parameter(self.params[name].detach().clone()) for name in (*first, *late)}
        before, others = self.kind, (None, *self.kind.others)
        other = others[way % len(others)]
        if other is not None and not KINDS[other].is_attached and late and not self.late_is_appended:
            other = None  # CPR that is built in refuses another group
        if other is not None:
            self.kind = replace(KINDS[other], dtype=before.dtype)
        optimizer = self.built(fresh)
        if late and self.late_is_appended:
            self.append_late(optimizer, fresh["late"])
        elif late:
            optimizer.add_param_group(
                {"params": [("late", fresh["late"]) if self.is_named else fresh["late"]]}
            )
        refusal = None
        try:
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            self.kind = before
            assert "\n" not in refusal
            assert order != "same" and ("order" in refusal or not self.is_named), refusal
            return
        self.seen[f"loaded, {order}"] += 1
        self.seen["loaded, another kind"] += other is not None
        self.optimizer, self.params = optimizer, fresh
        for name, p in fresh.items():
            p.requires_grad_(name not in self.frozen)
        self.method = attached_method(optimizer)


def play(kind: str, count: int = 20, search: int = 1000, **options: Any) -> Counter[str]:
    """Play lives of a kind of optimizer, and return what has happened in them."""
    life = type("Life", (OptimizerLife,), {"kind": KINDS[kind], "seen": Counter()})
    chosen = settings(examples.examples(count, search), stateful_step_count=30, **options)
    run_state_machine_as_test(life, settings=chosen)
    return life.seen


@pytest.mark.filterwarnings("ignore:.*no bound is set after step", "ignore:R of .* was so far above")
@pytest.mark.parametrize("kind", KINDS)
def test_any_life_agrees_with_the_oracle(kind: str) -> None:
    seen = play(kind)
    assert seen["corrected"] > 5
