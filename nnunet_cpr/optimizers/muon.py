"""Muon for the parameter matrices, AdamW's rule for the other parameters, and CPR for both.

From top to bottom: the two optimizers, the choice of the parameters that Muon steps, and the
Newton-Schulz iteration, which sets the singular values of matrices to about 1. Each iteration multiplies
an m x n matrix X, m <= n, by a polynomial of its Gram matrix R = X X^T::

    X <- (a I + b R + c R^2) X

Its coefficients a, b, c may differ between iterations. The m x m factors commute, so R and their product
Q can be iterated without X (Gram Newton-Schulz, Zhang et al., 2026)::

    Z = a I + b R + c R^2,    Q <- Q Z,    R <- R Z^2

X is multiplied by Q at the end. Five iterations take 4 m^2 n + 34 m^3 operations instead of
20 m^2 n + 10 m^3.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nnunet_cpr._distributed import is_sharded
from nnunet_cpr._validation import positive_integer, positive_number, short_repr
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.optimizers._groups import copy_loaded_state, cpr_and_groups, torch_groups
from nnunet_cpr.param_groups import Params, param_groups, regularized, select, unwrap
from nnunet_cpr.regularizers import Regularizer

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

KINDS = ("first", "head", "transposed", "depthwise")
"""Kinds of parameter matrices that can be left to AdamW's rule; see :func:`kinds`."""
ADAMW_KINDS = ("first", "head", "depthwise")
"""Kinds that are left to AdamW's rule by default."""

ADAMW = "adamw"
MUON = "muon"
MUON_TRANSPOSED = "muon_transposed"
"""Muon for a weight with the output channels in the second dimension, after the input channels."""

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Triple]
"""Coefficients of Newton-Schulz: the name of a preset, or one triple for each iteration."""

PRESETS: dict[str, tuple[Triple, ...]] = {
    "original": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
}
"""Coefficients of Keller Jordan's Muon, of modded-nanogpt's GPT-2 medium, and of Polar Express."""

_MAX_ERROR = 0.1
"""Estimated error of R above which it is computed from X again."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for parameter matrices, with AdamW's rule for the other parameters.

    The weight of a convolutional or linear layer is a matrix with one row for each output channel. Its
    update is the momentum, orthogonalized by the Newton-Schulz iteration: all its singular values
    become about 1. Matrices with equal shorter sides are orthogonalized together.

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
            AdamW's rule; :func:`nnunet_cpr.optimizers.muon.kinds` defines them.
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adjust_lr": adjust_lr,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "adamw_for": adamw_for,
        }
        _check_options(defaults)
        super().__init__(_with_rules(params, model, adamw_for), defaults)
        if all(rule == ADAMW for group in self.param_groups for rule in group["rules"]):
            others = f" other than {', '.join(adamw_for)}; choose adamw_for=() to include these"
            warnings.warn(
                "params: no parameter to orthogonalize for Muon, AdamW's rule steps all; expected "
                f"parameter matrices{others if adamw_for else ''}",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose matrices Muon steps unless it has ``use_muon=False``.

        Raises:
            TypeError, ValueError: as the constructor does; nothing is changed then.
        """
        _check_options({**self.defaults, **param_group})
        if "rules" not in param_group:
            (param_group,) = _with_rules([param_group], None, ())
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with the rules that it was saved with.

        Raises:
            ValueError: it is not a state of Muon; nothing is changed then.
        """
        if not all("rules" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "state_dict: expected the state of Muon, got one without the rules of its parameters; "
                "load it into the optimizer that it was saved from"
            )
        super().load_state_dict(state_dict)
        copy_loaded_state(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: a gradient is sparse; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = _gradients(p for group in self.param_groups for p in group["params"])
        if any(grad.layout is not torch.strided for grad in grads):
            raise RuntimeError("Muon does not support sparse gradients")
        for group in self.param_groups:
            matrices, others = [], []
            for p, rule in zip(group["params"], group["rules"]):
                if p.grad is None:
                    continue
                if rule == ADAMW:
                    others.append(p)
                else:
                    matrices.append((p, rule == MUON_TRANSPOSED))
            if matrices:
                self._step_matrices(group, matrices)
            if others:
                self._step_others(group, others)
        return loss

    def _step_matrices(self, group: dict[str, Any], matrices: list[tuple[Tensor, bool]]) -> None:
        """Take Muon's step for parameters and their transposition (True for input channels first)."""
        lr, momentum = float(group["lr"]), group["momentum"]
        params = [p for p, _ in matrices]
        buffers = []
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, _gradients(params), 1 - momentum)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])

        alike: dict[Any, list[tuple[Tensor, bool, Tensor]]] = {}
        for (p, is_transposed), buffer in zip(matrices, buffers):
            rows = p.shape[1 if is_transposed else 0]
            side = min(rows, p.numel() // rows)
            alike.setdefault((side, p.device), []).append((p, is_transposed, buffer))
        coefficients = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        for members in alike.values():
            directions = [buffer for _, _, buffer in members]
            if group["nesterov"]:
                grads = _gradients(p for p, _, _ in members)
                directions = [torch.lerp(g, d, momentum) for g, d in zip(grads, directions)]
            updates = orthogonalize(
                [_as_matrix(d, own[1]) for d, own in zip(directions, members)],
                coefficients,
                eps=group["eps"],
                dtype=getattr(torch, group["ns_dtype"]),
            )
            for (p, is_transposed, _), update in zip(members, updates):
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
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            _gradients(params),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            has_complex=any(torch.is_complex(p) for p in params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class MuonCPR(Muon):
    """:class:`~nnunet_cpr.optimizers.Muon` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    CPR regularizes the matrices of both rules.

    Args:
        params: as in :class:`~nnunet_cpr.optimizers.SGDCPR`. A group may have its own ``use_muon`` and
            ``adamw_for``.
        lr, momentum, nesterov, betas, eps: as in :class:`~nnunet_cpr.optimizers.Muon`.
        adjust_lr, ns_steps, ns_coefficients, ns_dtype, adamw_for, model: as there.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: as in :class:`~nnunet_cpr.optimizers.SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with an unknown key.
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``Muon`` do.

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
        known = {
            *("momentum", "nesterov", "betas", "eps", "use_muon", "adamw_for"),
            *("adjust_lr", "ns_steps", "ns_coefficients", "ns_dtype"),
        }
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        if isinstance(params, nn.Module):
            model = params
        else:
            params = param_groups(params)
        self.cpr, groups = cpr_and_groups("MuonCPR", params, given, weight_decay, known)
        assign_rules(groups, self.cpr.parameters, model, check_kinds(adamw_for))
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            betas=betas,
            eps=eps,
            adjust_lr=adjust_lr,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            adamw_for=adamw_for,
        )
        self.cpr.attach(self)


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a parameter group.

    Raises:
        TypeError, ValueError: one is out of range.
    """
    if not float(options["lr"]) >= 0:
        raise ValueError(f"Invalid learning rate: {options['lr']}")
    betas = dict(zip(("betas[0]", "betas[1]"), options["betas"]))
    for name, value in {"momentum": options["momentum"], **betas}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected 0 or above and below 1, got {short_repr(value)}")
    for name in ("eps", "weight_decay"):
        positive_number(name, options[name], allow_zero=True)
    for name, choices in (("adjust_lr", ADJUSTMENTS), ("ns_dtype", DTYPES)):
        if options[name] not in choices:
            raise ValueError(f"{name}: unknown {options[name]!r}; choose from {', '.join(choices)}")
    resolve_coefficients(options["ns_coefficients"], positive_integer("ns_steps", options["ns_steps"]))


def _with_rules(
    params: Params, model: nn.Module | None, adamw_for: Sequence[str]
) -> list[dict[str, Any]]:
    """Return parameter groups with the rule of each parameter."""
    if isinstance(params, nn.Module):
        whole = params
    else:
        whole, items = None, list(params)
        if items and all(isinstance(group, dict) and "rules" in group for group in items):
            return items  # type: ignore[return-value]
        params = items  # type: ignore[assignment]
    given = param_groups(params)
    groups = torch_groups(whole if whole is not None else given)
    assign_rules(groups, [p for _, p, _ in select(given)], model or whole, adamw_for)
    return groups


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _as_matrix(tensor: Tensor, is_transposed: bool) -> Tensor:
    """Return a tensor with the shape of a weight as a matrix, one row for each output channel."""
    return (tensor.transpose(0, 1) if is_transposed else tensor).flatten(1)


def _as_weight(matrix: Tensor, p: Tensor, is_transposed: bool) -> Tensor:
    """Return a matrix from :func:`_as_matrix` with the shape of the weight."""
    shape = p.transpose(0, 1).shape if is_transposed else p.shape
    weight = matrix.reshape(shape)
    return weight.transpose(0, 1) if is_transposed else weight


# Choice of the parameters


def kinds(model: nn.Module) -> dict[int, set[str]]:
    """Return the kinds of each regularized parameter of a model, by the id of the parameter.

    - ``first``: the weight of the first convolutional or linear layer, unless an embedding is before it.
    - ``head``: the segmentation heads of nnU-Net's networks (``seg_layers``), the classifier of timm's
      models, or else the weight of the last convolutional or linear layer.
    - ``transposed``: weights of transposed convolutions.
    - ``depthwise``: weights of convolutions with one group for each channel.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 2, 1))
        >>> [sorted(found) for found in kinds(model).values()]
        [['first'], ['transposed'], ['head']]
    """
    model = unwrap(model)
    matrices = regularized(model)
    found: dict[int, set[str]] = {id(p): set() for p in matrices.values()}
    if not found:
        return found
    # Of all layers, as no other layer takes the place of one that is not regularized.
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    inputs = [m for m in model.modules() if isinstance(m, nn.Embedding) or m in layers[:1]]
    first = [p for m in inputs[:1] if m in layers for p in m.parameters(recurse=False)]
    for kind, members in (("first", first), ("head", _head(model, matrices, layers))):
        for p in members:
            found.get(id(p), set()).add(kind)
    for layer in layers:
        of_layer = found.get(id(layer.weight), set())
        if isinstance(layer, nn.modules.conv._ConvNd):
            if layer.transposed:
                of_layer.add("transposed")
            if 1 < layer.groups == layer.in_channels:
                of_layer.add("depthwise")
    return found


def _head(model: nn.Module, matrices: dict[str, Tensor], layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters of the segmentation heads, of timm's classifier, or of the last layer."""
    heads = [p for name, p in matrices.items() if "seg_layers" in name.split(".")]
    if heads:
        return heads
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        found = classifier()
        last = [m for m in (found if isinstance(found, tuple) else (found,)) if isinstance(m, nn.Module)]
        return [p for module in last for p in module.parameters()]
    return [p for layer in layers[-1:] for p in layer.parameters(recurse=False)]


def check_kinds(adamw_for: Sequence[str]) -> tuple[str, ...]:
    """Return ``adamw_for`` as a tuple in the order of :data:`KINDS`.

    Raises:
        ValueError: unknown kind.
    """
    given = [adamw_for] if isinstance(adamw_for, str) else list(adamw_for)
    for kind in given:
        if kind not in KINDS:
            raise ValueError(f"adamw_for: unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in given)


def assign_rules(
    groups: Sequence[dict[str, Any]],
    matrices: Iterable[Tensor],
    model: nn.Module | None,
    adamw_for: Sequence[str],
) -> None:
    """Set ``rules`` of each parameter group: the rule of each of its parameters.

    Args:
        groups: parameter groups, with or without names. ``use_muon`` of a group decides for all of its
            parameters with at least two rows and columns, and its ``adamw_for`` replaces the argument.
        matrices: parameter matrices that CPR would regularize.
        model: module of the parameters, None if it is not known. The kinds are then not known either.
        adamw_for: kinds of matrices that follow AdamW's rule.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: a group has an unknown kind.
    """
    known = {} if model is None else kinds(model)
    regularized_ids = {id(p) for p in matrices if model is None or id(p) in known}
    for group in groups:
        left_out = check_kinds(group.get("adamw_for", adamw_for))
        for_muon = {key for key in regularized_ids if known.get(key, set()).isdisjoint(left_out)}
        members = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        for p in members:
            if is_sharded(p):
                raise TypeError(
                    f"parameter of shape {tuple(p.shape)}: expected a plain tensor, got a DTensor, "
                    "which Muon does not support; use AdamCPR"
                )
        use = group.get("use_muon")
        group["rules"] = [
            _rule(p, id(p) in for_muon if use is None else use, known.get(id(p), set())) for p in members
        ]


def _rule(p: Tensor, use_muon: bool, found: set[str]) -> str:
    if not use_muon or p.ndim < 2:
        return ADAMW
    rows = p.shape[1 if "transposed" in found else 0]
    if min(rows, p.numel() // max(rows, 1)) < 2:  # orthogonalizing a vector only normalizes it
        return ADAMW
    return MUON_TRANSPOSED if "transposed" in found else MUON


# Newton-Schulz


def resolve_coefficients(coefficients: Coefficients, steps: int) -> list[Triple]:
    """Return one triple of coefficients for each iteration; the last one is repeated.

    Raises:
        ValueError: unknown preset, or not a sequence of triples of finite numbers.

    Example:
        >>> resolve_coefficients([(2, -1.5, 0.5), (1.5, -0.5, 0)], 3)
        [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0)]
    """
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ValueError(
                f"ns_coefficients: unknown preset {coefficients!r}; choose from {', '.join(PRESETS)}"
            )
        coefficients = PRESETS[coefficients]
    try:
        triples = [(float(a), float(b), float(c)) for a, b, c in coefficients]
    except (TypeError, ValueError):
        triples = []
    if not triples or not all(math.isfinite(x) for triple in triples for x in triple):
        raise ValueError(
            "ns_coefficients: expected a preset or triples of finite numbers, one for each iteration, "
            f"got {short_repr(coefficients)}"
        )
    return [triples[min(i, len(triples) - 1)] for i in range(steps)]


def orthogonalize(
    matrices: Sequence[Tensor], coefficients: Sequence[Triple], *, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return matrices with the same singular vectors and singular values of about 1.

    Args:
        matrices: matrices on one device whose shorter sides are equal, which are iterated in one batch.
        coefficients: coefficients of each iteration.
        eps: lower limit of the Frobenius norm that a matrix is divided by.
        dtype: dtype of the products and of the result.

    Example:
        >>> tall, wide = orthogonalize(
        ...     [torch.randn(6, 2), torch.randn(2, 9)],
        ...     resolve_coefficients("quintic", 5),
        ...     eps=1e-7,
        ...     dtype=torch.float32,
        ... )
        >>> bool((torch.linalg.svdvals(tall) - 1).abs().max() < 0.3)
        True
    """
    wide = [_normalize(_as_wide(matrix), eps).to(dtype) for matrix in matrices]
    for section in _sections(coefficients, _unit_roundoff(dtype, wide[0].device)):
        gram = torch.stack([x @ x.mT for x in wide])
        factor = product = _polynomial(gram, section[0])
        for triple in section[1:]:
            gram = gram @ factor @ factor
            factor = _polynomial(gram, triple)
            product = product @ factor
        for i, q in enumerate(product):
            wide[i] = q @ wide[i]
    return [x if x.shape == matrix.shape else x.mT for x, matrix in zip(wide, matrices)]


def _polynomial(gram: Tensor, triple: Triple) -> Tensor:
    a, b, c = triple
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _as_wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _normalize(matrix: Tensor, eps: float) -> Tensor:
    """Return a matrix divided by its Frobenius norm, an upper bound of its singular values.

    The result is in float32 at least, because the squares of small gradients are zero in float16.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return matrix / torch.linalg.vector_norm(matrix).clamp_min(eps)


def _unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative rounding error of the factors of a matrix product.

    A GPU may round float32 to TensorFloat-32, by settings that differ between versions of torch.
    """
    if dtype == torch.float32 and device.type != "cpu":
        return 2.0**-11
    return torch.finfo(dtype).eps / 2


def _sections(coefficients: Sequence[Triple], roundoff: float) -> Iterator[list[Triple]]:
    """Yield lists of iterations, before each of which R is computed from X.

    An iteration multiplies eigenvalues of R near zero by a^2. Rounding makes some of them negative. The
    iteration diverges if they grow to the size of the other eigenvalues.

    Example:
        >>> coefficients = resolve_coefficients("quintic", 5)
        >>> for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ...     print([len(s) for s in _sections(coefficients, torch.finfo(dtype).eps / 2)])
        [5]
        [2, 3]
        [2, 2, 1]
    """
    section: list[Triple] = []
    error = roundoff
    for triple in coefficients:
        if section and error > _MAX_ERROR:
            yield section
            section, error = [], roundoff
        section.append(triple)
        error *= triple[0] ** 2
    yield section
