"""Muon for the parameter matrices and AdamW's rule for the other parameters; the same with CPR.

:func:`muon_update` is the update. The class is longer than that of Jordan's ``muon.py``, since it
chooses the rule of each parameter itself and lets rules follow parameters (``muon_rules.py``),
orthogonalizes matrices of similar shapes together (``newton_schulz.py``), and checks timm's options.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nnunet_cpr.cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr.regularized_parameters import Params, param_groups
from nnunet_cpr.cpr.regularizers import Regularizer
from nnunet_cpr.cpr.tensors import check_tensors
from nnunet_cpr.optimizers import muon_rules, newton_schulz
from nnunet_cpr.optimizers.groups import LoadsByName, cpr_and_groups
from nnunet_cpr.optimizers.muon_rules import ADAMW, ADAMW_KINDS, MUON_TRANSPOSED, check_kinds
from nnunet_cpr.optimizers.newton_schulz import Coefficients, Triple, resolve_coefficients
from nnunet_cpr.refusals import positive_integer, positive_number, short_repr

DEFAULT_LR = 3e-3
"""Learning rate, the highest one of nnU-Net's trainers too (``MUON_LR`` of their names)."""
DEFAULT_MOMENTUM = 0.95
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "rms_to_rms": lambda rows, columns: math.sqrt(rows / columns),
}
"""Scales of the learning rate of a matrix, by their names in timm."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of the orthogonalization."""
_TORCHS_OPTIONS = ("maximize", "amsgrad", "differentiable", "capturable")
"""Options of torch's optimizers that change a step, and that this one does not have."""


class Muon(LoadsByName, torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for parameter matrices, with AdamW's rule for the other parameters.

    The weight of a convolutional or linear layer is a matrix with one row for each output channel. Its
    update is the momentum, orthogonalized by the Newton-Schulz iteration: all its singular values
    become about 1. Matrices of similar shapes are orthogonalized together.

    Orthogonalized are the parameters that CPR would regularize (:mod:`nnunet_cpr.param_groups`), except
    for the kinds in ``adamw_for`` and those with a single row or column. ``rules`` of a parameter group
    lists the rule of each parameter.

    Args:
        params: module, named parameters, parameters or parameter groups. A group may set ``use_muon`` to
            choose the rule of all its parameters, or its own ``adamw_for``.
        lr: learning rate of both rules.
        momentum: coefficient of Muon's running average of the gradients.
        nesterov: orthogonalize the average of momentum and gradient instead of the momentum.
        betas: coefficients of AdamW's running averages.
        eps: term added to AdamW's denominator; lower limit of the norm that Newton-Schulz divides by.
        weight_decay: decoupled weight decay of all parameters, multiplied by the learning rate.
        adjust_lr: scale of Muon's learning rate for a matrix with m rows and n columns.
            ``match_rms_adamw``, 0.2 sqrt(max(m, n)), gives updates the root mean square of AdamW's, so
            that both rules share a learning rate. ``original`` is sqrt(max(1, m / n)), ``rms_to_rms``
            sqrt(m / n).
        ns_steps: number of Newton-Schulz iterations.
        ns_coefficients: their coefficients: ``quintic``, ``original``, ``polar_express``, or one triple
            for each iteration, of which the last is repeated.
        ns_dtype: their dtype by its name: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        adamw_for: kinds of matrices (``first``, ``head``, ``transposed``, ``depthwise``) that follow
            AdamW's rule; :func:`nnunet_cpr.optimizers.muon_rules.kinds` defines them.
        model: module of the parameters, for their kinds, if ``params`` is not a module. Without a module
            the kinds are not known, and transposed convolutions are not recognized.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: a setting is out of range.

    Warns:
        UserWarning: no parameter is orthogonalized.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        >>> Muon(model, lr=3e-3).param_groups[0]["rules"]
        ['adamw', 'adamw', 'muon', 'adamw', 'adamw', 'adamw']
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = DEFAULT_LR,
        momentum: float = DEFAULT_MOMENTUM,
        nesterov: bool = False,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-7,
        weight_decay: float = 0.0,
        adjust_lr: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "quintic",
        ns_dtype: str = "float32",
        adamw_for: Sequence[str] = ADAMW_KINDS,
        model: nn.Module | None = None,
    ) -> None:
        adamw_for = check_kinds(adamw_for)
        if model is None and isinstance(params, nn.Module):
            model = params
        self._model = model
        # Parameters and rules of each group, by its id, as they belong together.
        self._ruled: dict[int, tuple[list[Tensor], list[str]]] = {}
        self._betas = betas  # schedulers would cycle betas of the defaults in place of momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
            "weight_decay": weight_decay,
            "adjust_lr": adjust_lr,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "adamw_for": adamw_for,
        }
        _check_options({**defaults, "betas": betas})
        super().__init__(muon_rules.with_rules(params, model, adamw_for), defaults)
        if all(rule == ADAMW for group in self.param_groups for rule in group["rules"]):
            others = f" other than {', '.join(adamw_for)}; choose adamw_for=() to include these"
            warnings.warn(
                "params: no parameter to orthogonalize for Muon, AdamW's rule steps all; expected "
                f"parameter matrices{others if adamw_for else ''}",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with the rules that the constructor would choose.

        Raises:
            TypeError, ValueError: as the constructor does; nothing is changed then.
        """
        param_group = {"betas": self._betas, **param_group}
        _check_options({**self.defaults, **param_group})
        if "rules" not in param_group:
            adamw_for = self.defaults["adamw_for"]
            (param_group,) = muon_rules.with_rules([param_group], self._model, adamw_for)
        super().add_param_group(param_group)
        self._remember_rules(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters than the model, and does not know their kinds.
        return {**super().__getstate__(), "_betas": self._betas, "_model": None, "_ruled": {}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with a rule for each parameter."""
        for group in self.param_groups:
            self._follow_parameters(group)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with the rules that it was saved with.

        Raises:
            ValueError: it is not a state of Muon; nothing is changed then.
        """
        groups = state_dict["param_groups"]
        if not all(len(group.get("rules", [])) == len(group["params"]) for group in groups):
            raise ValueError(
                "state_dict: expected the state of Muon, got one without a rule for each parameter; "
                "load it into the optimizer that it was saved from"
            )
        super().load_state_dict(state_dict)
        self._ruled = {}
        for group in self.param_groups:
            self._remember_rules(group)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. ``torch.compile`` does not compile it.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: a gradient is sparse, or it or the state does not fit the parameter; nothing is
                changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_tensors(self, {})
        for group in self.param_groups:
            self._follow_parameters(group)
            pairs = [pair for pair in zip(group["params"], group["rules"]) if pair[0].grad is not None]
            matrices = [(p, rule == MUON_TRANSPOSED) for p, rule in pairs if rule != ADAMW]
            others = [p for p, rule in pairs if rule == ADAMW]
            if matrices:
                self._step_matrices(group, matrices)
            if others:
                self._step_others(group, others)
        return loss

    def _follow_parameters(self, group: dict[str, Any]) -> None:
        """Let rules follow the parameters of a group of which some were dropped, appended or moved.

        Raises:
            ValueError: rules and parameters differ in number, and it is not known which belong together.
        """
        params, (known, before) = group["params"], self._ruled.get(id(group), ([], []))
        is_same = len(params) == len(known) and all(map(operator.is_, params, known))
        if is_same and group["rules"] == before:
            return
        if not is_same and known and group["rules"] == before:  # else rules were set for the parameters
            rules = dict(zip(map(id, known), before))
            new = [p for p in params if id(p) not in rules]
            rules |= zip(map(id, new), self._rules_of(group, new))
            group["rules"] = [rules[id(p)] for p in params]
        if len(params) != len(group["rules"]):
            raise ValueError(
                f"parameter group: expected a rule for each of {len(params)} parameters, got "
                f"{len(group['rules'])}; change rules of the group, too"
            )
        self._remember_rules(group)

    def _remember_rules(self, group: dict[str, Any]) -> None:
        self._ruled[id(group)] = list(group["params"]), list(group["rules"])

    def _rules_of(self, group: dict[str, Any], params: list[Tensor]) -> list[str]:
        """Return the rules of new parameters of a group, as the constructor chooses them."""
        if not params:
            return []
        like = {key: group[key] for key in ("use_muon", "adamw_for") if key in group}
        (found,) = muon_rules.with_rules([{**like, "params": params}], self._model, group["adamw_for"])
        return list(found["rules"])

    def _step_matrices(self, group: dict[str, Any], matrices: list[tuple[Tensor, bool]]) -> None:
        """Take Muon's step for parameters and their transposition (True for input channels first)."""
        lr = float(group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_([p for p, _ in matrices], 1 - lr * group["weight_decay"])
        batches: dict[Any, list[tuple[Tensor, bool]]] = {}
        for p, is_transposed in matrices:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            rows = p.shape[1 if is_transposed else 0]
            key = newton_schulz.batch_key(rows, p.numel() // rows), p.device
            batches.setdefault(key, []).append((p, is_transposed))
        for batch in batches.values():
            updates = muon_update(
                _gradients(p for p, _ in batch),
                [self.state[p]["momentum_buffer"] for p, _ in batch],
                [is_transposed for _, is_transposed in batch],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                coefficients=resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
                eps=group["eps"],
                dtype=getattr(torch, group["ns_dtype"]),
            )
            for (p, is_transposed), update in zip(batch, updates):
                scale = ADJUSTMENTS[group["adjust_lr"]](*update.shape)
                p.add_(_as_weight(update, p, is_transposed).to(p.dtype), alpha=-lr * scale)

    def _step_others(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Take AdamW's step."""
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        first, second, steps = (
            [self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        lists = params, _gradients(params), first, second, list[Tensor](), steps
        beta1, beta2 = group["betas"]
        own = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "eps": group["eps"]}
        adamw(*lists, foreach=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, **own)


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a parameter group.

    Raises:
        TypeError, ValueError: one is out of range.
    """
    if not float(options["lr"]) >= 0:
        raise ValueError(f"Invalid learning rate: {options['lr']}")
    for name in _TORCHS_OPTIONS:
        if options.get(name):
            raise TypeError(f"{name}: expected no such option for Muon, got {options[name]!r}")
    _check_coefficient("momentum", options["momentum"])
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {short_repr(betas)}")
    _check_coefficient("betas[0]", betas[0])
    _check_coefficient("betas[1]", betas[1])
    positive_number("eps", options["eps"], allow_zero=True)
    positive_number("weight_decay", options["weight_decay"], allow_zero=True)
    _check_choice("adjust_lr", options["adjust_lr"], ADJUSTMENTS)
    _check_choice("ns_dtype", options["ns_dtype"], DTYPES)
    resolve_coefficients(options["ns_coefficients"], positive_integer("ns_steps", options["ns_steps"]))


def _check_coefficient(name: str, value: Any) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected 0 or above and below 1, got {short_repr(value)}")


def _check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: unknown {value!r}; choose from {', '.join(choices)}")


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def muon_update(
    gradients: list[Tensor],
    momenta: list[Tensor],
    is_transposed: Sequence[bool],
    *,
    momentum: float,
    nesterov: bool,
    coefficients: Sequence[Triple],
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return Muon's updates of weights: their orthogonalized momenta, as matrices.

    Args:
        gradients: gradients of weights whose matrices have the same :func:`newton_schulz.batch_key`.
        momenta: running averages of the gradients, updated in place.
        is_transposed: True for weights with input channels first, as those of transposed convolutions.
        momentum: coefficient of the average.
        nesterov: orthogonalize the average of momentum and gradient instead of the momentum.
        coefficients, eps, dtype: of :func:`newton_schulz.orthogonalize`.

    Example:
        >>> gradient, momentum = torch.diag(torch.tensor([3.0, 0.1])), torch.zeros(2, 2)
        >>> options = {"momentum": 0.95, "nesterov": False, "eps": 1e-7, "dtype": torch.float32}
        >>> options["coefficients"] = resolve_coefficients("polar_express", 8)
        >>> (update,) = muon_update([gradient], [momentum], [False], **options)
        >>> torch.allclose(update, torch.eye(2), atol=0.02)
        True
    """
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    directions = (
        [torch.lerp(*both, momentum) for both in zip(gradients, momenta)] if nesterov else momenta
    )
    return newton_schulz.orthogonalize(
        [_as_matrix(*both) for both in zip(directions, is_transposed)],
        coefficients,
        eps=eps,
        dtype=dtype,
    )


def _as_matrix(tensor: Tensor, is_transposed: bool) -> Tensor:
    """Return a tensor with the shape of a weight as a matrix, one row for each output channel."""
    return (tensor.transpose(0, 1) if is_transposed else tensor).flatten(1)


def _as_weight(matrix: Tensor, p: Tensor, is_transposed: bool) -> Tensor:
    """Return a matrix from :func:`_as_matrix` with the shape of the weight."""
    shape = p.transpose(0, 1).shape if is_transposed else p.shape
    weight = matrix.reshape(shape)
    return weight.transpose(0, 1) if is_transposed else weight


class MuonCPR(Muon):
    """:class:`~nnunet_cpr.optimizers.Muon` with :class:`~nnunet_cpr.CPR` in place of weight decay.

    CPR regularizes the matrices of both rules.

    Args:
        params: as in :class:`~nnunet_cpr.optimizers.SGDCPR`. A group may have its own ``use_muon`` and
            ``adamw_for``.
        lr, momentum, nesterov, betas, eps: as in :class:`~nnunet_cpr.optimizers.Muon`.
        adjust_lr, ns_steps, ns_coefficients, ns_dtype, adamw_for, model: as there.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.CPR` and ``Muon`` do.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        >>> MuonCPR(model, lr=3e-3, kappa="ws1000").cpr
        CPR(3 matrices, kappa=KappaWS(steps=1000), regularizer=l2, mu=1.0, adaptive=False)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = DEFAULT_LR,
        momentum: float = DEFAULT_MOMENTUM,
        nesterov: bool = False,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-7,
        adjust_lr: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "quintic",
        ns_dtype: str = "float32",
        adamw_for: Sequence[str] = ADAMW_KINDS,
        model: nn.Module | None = None,
        weight_decay: float = 0,
    ) -> None:
        known = set(inspect.signature(Muon).parameters) - {"model"} | {"use_muon"}
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        if not isinstance(params, nn.Module):
            params = param_groups(params)
        elif model is None:
            model = params
        self.cpr, groups = cpr_and_groups("MuonCPR", params, given, weight_decay, known)
        muon_rules.assign_rules(groups, self.cpr.parameters, model, check_kinds(adamw_for))
        options: dict[str, Any] = {"betas": betas, "eps": eps, "adjust_lr": adjust_lr}
        options |= {"ns_steps": ns_steps, "ns_coefficients": ns_coefficients, "ns_dtype": ns_dtype}
        super().__init__(groups, lr, momentum, nesterov, adamw_for=adamw_for, model=model, **options)
        self.cpr.attach(self)
