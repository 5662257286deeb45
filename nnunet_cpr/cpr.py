"""Constrained Parameter Regularization for any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnunet_cpr._attachment import RegularizationMethod, StepInputs
from nnunet_cpr._distributed import Shards, local_tensors
from nnunet_cpr._validation import positive_number, short_repr
from nnunet_cpr.bounds import Bound, KappaWS, as_bound
from nnunet_cpr.param_groups import Params, param_groups, select
from nnunet_cpr.regularizers import L2, REGULARIZERS, Regularizer, accumulator, get_regularizer


@dataclass(frozen=True)
class CPRSettings:
    """Settings of CPR for one parameter matrix, see :class:`CPR`."""

    bound: Bound
    regularizer: Regularizer
    mu: float
    adaptive: bool

    KEYS: ClassVar[tuple[str, ...]] = ("kappa", "regularizer", "mu", "adaptive")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> CPRSettings:
        """Return the settings from the values of :data:`KEYS` in arguments or a parameter group.

        Raises:
            TypeError: ``kappa`` is neither a bound nor a string, or ``adaptive`` is not a bool.
            ValueError: invalid value.
        """
        adaptive = given["adaptive"]
        if not isinstance(adaptive, bool):
            raise TypeError(f"adaptive: expected True or False, got {short_repr(adaptive)}")
        return cls(
            bound=as_bound(given["kappa"]),
            regularizer=get_regularizer(given["regularizer"]),
            mu=positive_number("mu", given["mu"], float32=True),  # the dtype of the multipliers
            adaptive=adaptive,
        )

    @property
    def largest_multiplier(self) -> float:
        """Upper limit of the multiplier in a correction."""
        return self.regularizer.largest_multiplier

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values that :meth:`parse` reads, for parameter groups."""
        return {
            "kappa": str(self.bound),
            "regularizer": self.regularizer.name,
            "mu": self.mu,
            "adaptive": self.adaptive,
        }

    def config(self) -> dict[str, Any]:
        """Return the settings as plain values for state dicts."""
        return {**self.plain(), "kappa": repr(self.bound)}


_LARGEST = torch.finfo(torch.float32).max


class CPR(RegularizationMethod):
    r"""Constrained Parameter Regularization: an upper bound on R of each parameter matrix.

    Before each optimizer step t, for each of the J regularized matrices (the paper's Algorithm 1):

    .. math::
        r^j &= R(\theta_t^j) \\
        \lambda^j &\leftarrow \max(0,\ \lambda^j + \mu\,(r^j - \kappa^j)) \\
        \theta^j &\leftarrow \theta^j - \lambda^j\, g(\theta_t^j)

    g is the correction direction of R, given with each regularization function in
    :mod:`nnunet_cpr.regularizers`. Then the optimizer takes its step; its own weight decay must be 0 on
    the regularized matrices. A bound that is not set yet is +inf, and its matrix is not changed.

    A matrix without a gradient in a step is not changed in that step, nor is its Lagrange multiplier.
    The same holds for a matrix whose regularization value is not finite; :meth:`metrics` counts these.
    CPR reads parameters, not gradients: a gradient that is not finite reaches the matrix through the
    optimizer, and CPR leaves that matrix out from the next step on. For ``l2`` the factor 1 - 2 lambda
    is at least 0; :meth:`metrics` counts the corrections that are limited by this. A step that
    ``GradScaler`` skips does not count.

    Args:
        params: module, named parameters, parameters or parameter groups; see
            :mod:`nnunet_cpr.param_groups` for the selection of the regularized ones. A group may have
            its own ``kappa``, ``regularizer``, ``mu`` and ``adaptive``.
        kappa: bound (:mod:`nnunet_cpr.bounds`) or its word, such as ``KappaWS(1000)`` or ``"ws1000"``.
        regularizer: regularization function R (:mod:`nnunet_cpr.regularizers`) by its name (``l2``,
            ``l1``, ``std`` or ``huber``) or as an object.
        mu: update rate of the Lagrange multipliers.
        adaptive: AdaCPR (the paper's appendix on adaptive bounds): set a bound to the present
            regularization value when its multiplier has returned to 0.

    Attributes:
        bound: the argument ``kappa`` as an object; :attr:`kappa` are the values that it has set.
        regularizer, mu, adaptive: settings of the groups that do not have their own.
        settings: one :class:`CPRSettings` for each matrix, in the order of ``names``.

    Raises:
        TypeError: ``params``, ``kappa`` or ``adaptive`` has the wrong type.
        ValueError: unknown regularizer, or ``mu`` is not positive and finite.

    Warns:
        UserWarning: no parameter can be regularized.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        >>> cpr = CPR(model, kappa="ws1000")
        >>> optimizer = cpr.attach(optimizer)
        >>> cpr
        CPR(1 matrices, kappa=KappaWS(steps=1000), regularizer=l2, mu=1.0, adaptive=False)
    """

    title = "CPR"
    state_key = "cpr"

    def __init__(
        self,
        params: Params,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
    ) -> None:
        given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
        default = CPRSettings.parse(given)
        self.bound, self.regularizer = default.bound, default.regularizer
        self.mu, self.adaptive = default.mu, default.adaptive
        groups = param_groups(params)
        super().__init__(groups)
        self.settings = [CPRSettings.parse({**given, **group}) for _, _, group in select(groups)]
        self._parts = _parts(self.settings, self.parameters)
        self._shards = Shards(self.parameters, self.names)
        self.has_decay = all(own.regularizer is REGULARIZERS["l2"] for own in self.settings)
        self._mu = self._shared("mu")
        self._adaptive = self._shared("adaptive")
        self._limit = self._shared("largest_multiplier")
        self._all_set: tuple[Tensor | None, int] = None, 0  # bounds and their version when all were set

        count = self._state["step"]
        vector = torch.zeros(len(self.parameters), dtype=torch.float32, device=count.device)
        self._state |= {
            "skipped_updates": torch.zeros_like(count),
            "limited_corrections": torch.zeros_like(count),
            "kappa": torch.full_like(vector, math.inf),
            "lagrange_multiplier": vector,
        }
        if any(s.adaptive for s in self.settings):
            self._state["was_positive"] = torch.zeros_like(vector, dtype=torch.bool)
        own = set(self._state)
        for part in self._parts:
            memory = part.settings.bound.memory(vector[self._indices(part)])
            assert own.isdisjoint(memory), "the state of a bound needs keys of its own"
            for key, value in memory.items():
                all_matrices = self._state.setdefault(key, value.new_zeros(len(self.parameters)))
                all_matrices[self._indices(part)] = value

    # Present values

    @property
    def kappa(self) -> Tensor:
        """Bounds, float32 ``[J]`` in the order of ``names``; +inf where not set yet."""
        return self._state["kappa"].clone()

    @property
    def lagrange_multiplier(self) -> Tensor:
        """Lagrange multipliers lambda, float32 ``[J]`` in the order of ``names``."""
        return self._state["lagrange_multiplier"].clone()

    @property
    @torch.no_grad()
    def measure(self) -> Tensor:
        """R of the present parameters, float32 ``[J]`` in the order of ``names``."""
        return self._measure_from(self._sums())

    def metrics(self, measure: Tensor | None = None) -> dict[str, float]:
        """Return numbers to log. Waits for a GPU.

        Args:
            measure: :attr:`measure`, if it is known already.

        Returns:
            ``measure_to_kappa``: mean of R / kappa over the matrices with a bound (NaN without any);
            ``lagrange_multiplier_mean`` and ``lagrange_multiplier_max``; ``bounded`` and ``active``:
            fractions of matrices with a bound and with a positive multiplier; ``skipped_updates``:
            number of updates of a matrix left out because a value was not finite;
            ``limited_corrections``: number of corrections whose multiplier was cut to its limit (0.5 for
            ``l2``). Both numbers count from the first step.
        """
        measure = self.measure if measure is None else measure
        kappa, multiplier = self.kappa, self.lagrange_multiplier
        bounded = kappa.isfinite()
        count = max(len(self.parameters), 1)
        return {
            "measure_to_kappa": float((measure / kappa)[bounded & (kappa > 0)].mean()),
            "lagrange_multiplier_mean": float(multiplier.sum()) / count,
            "lagrange_multiplier_max": max(multiplier.tolist(), default=0.0),
            "bounded": int(bounded.sum()) / count,
            "active": int((multiplier > 0).sum()) / count,
            "skipped_updates": float(self._state["skipped_updates"]),
            "limited_corrections": float(self._state["limited_corrections"]),
        }

    def _may_be_nan(self) -> set[str]:
        return set().union(*(settings.bound.may_be_nan for settings in self.settings))

    # Update

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        """Update and correct, in a loop without an optimizer that this is attached to.

        Call it after the backward pass, just before the parameters are updated. An attached CPR does
        this by itself, and a call would regularize twice.

        Args:
            found_inf: as in :meth:`update`.
        """
        self._update_and_correct(found_inf)

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        sums = self._sums()
        multiplier = self.update(self._measure_from(sums), found_inf)
        numel = self._numel()
        for part, own in zip(self._parts, sums):
            part.settings.regularizer.correct_(
                local_tensors(part.parameters),
                multiplier[self._indices(part)],
                own,
                numel[self._indices(part)],
            )

    def _sums(self) -> list[Tensor]:
        """Return the sums that R of each part needs, over the elements of all processes."""
        self._move_state_to_parameters()
        own = [part.settings.regularizer.sums(local_tensors(part.parameters)) for part in self._parts]
        if len(own) <= 1:
            return [self._shards.total(sums) for sums in own]
        # One tensor for all parts needs one all-reduce.
        stacked = own[0].new_zeros(max(len(sums) for sums in own), len(self.parameters))
        for part, sums in zip(self._parts, own):
            stacked[: len(sums), self._indices(part)] = sums
        stacked = self._shards.total(stacked)
        return [stacked[: len(sums), self._indices(part)] for part, sums in zip(self._parts, own)]

    def _measure_from(self, sums: list[Tensor]) -> Tensor:
        """Return R of each matrix, float32 ``[J]``."""
        numel = self._numel()
        values = [
            part.settings.regularizer.measure(own, numel[self._indices(part)])
            for part, own in zip(self._parts, sums)
        ]
        if len(values) == 1:
            return values[0]
        measure = torch.zeros(len(self.parameters), dtype=torch.float32, device=self._device())
        for part, value in zip(self._parts, values):
            measure[self._indices(part)] = value
        return measure

    def update(self, measure: Tensor, found_inf: Tensor | None = None) -> Tensor:
        """Update bounds and multipliers (Algorithm 1) without waiting for a GPU.

        Args:
            measure: R(theta_t), float32 ``[J]``.
            found_inf: flag of ``GradScaler``, a scalar tensor; if it is not 0, the step is skipped and
                nothing is changed.

        Returns:
            Multipliers of the correction, float32 ``[J]``; 0 for matrices that are not corrected.
        """
        self._move_state_to_parameters()
        return self._update(measure, found_inf, self._has_grad())

    def _update(self, measure: Tensor, found_inf: Tensor | None, has_grad: Tensor | None) -> Tensor:
        """Return the result of :meth:`update`, given the result of :meth:`_has_grad`."""
        state = self._state
        kappa, multiplier = state["kappa"], state["lagrange_multiplier"]
        may_read = _may_read(measure)
        taken = None if found_inf is None else found_inf.to(measure.device).reshape(()) == 0
        if taken is not None:
            measure = torch.where(taken, measure, math.nan)
            has_grad = taken if has_grad is None else has_grad & taken

        if not (may_read and self._bounds_cannot_change()):
            self._update_bounds(measure)

        mu = self._on_device(self._mu, torch.float32)
        excess = measure - kappa
        proposed = (
            torch.add(multiplier, mu * excess)
            if isinstance(mu, Tensor)
            else torch.add(multiplier, excess, alpha=mu)
        ).clamp_(min=0)
        adaptive = self._on_device(self._adaptive, torch.bool)
        limit = self._on_device(self._limit, torch.float32)
        least = limit.clamp(max=_LARGEST) if isinstance(limit, Tensor) else min(limit, _LARGEST)
        is_plain = may_read and has_grad is None and adaptive is False
        # In nearly all steps, all multipliers are finite and none is limited.
        if is_plain and bool((proposed <= least).all()):
            multiplier.copy_(proposed)
            state["step"] += 1
            return proposed
        finite = proposed <= _LARGEST
        updated = finite if has_grad is None else has_grad & finite
        applied = torch.where(updated, proposed, 0.0)

        if adaptive is not False:
            was_positive = state["was_positive"]
            fell_back = updated & (multiplier == 0) & was_positive
            if isinstance(adaptive, Tensor):
                fell_back &= adaptive
            torch.where(fell_back, measure, kappa, out=kappa)
            torch.where(updated, multiplier > 0, was_positive, out=was_positive)
        torch.where(updated, proposed, multiplier, out=multiplier)
        skipped = ~finite if has_grad is None else has_grad & ~finite
        state["skipped_updates"] += skipped.sum()
        state["step"] += 1 if taken is None else taken
        if isinstance(limit, Tensor) or limit < math.inf:
            state["limited_corrections"] += (applied > limit).sum()
            applied.clamp_(max=limit)
        return applied

    def update_decay(self, inputs: StepInputs) -> Tensor:
        sums = self._shards.total(inputs.sums_of_squares()[None])
        measure = L2().measure(sums, self._numel())
        return self._update(measure, inputs.found_inf, self._has_grad()).mul_(2)

    def _bounds_cannot_change(self) -> bool:
        """Return True if no bound can change in this step. Waits for a GPU."""
        if not all(part.settings.bound.is_set_once for part in self._parts):
            return False
        step = self.step_count
        if all(step < part.settings.bound.earliest for part in self._parts):
            return True
        kappa = self._state["kappa"]
        known, version = self._all_set
        if (known is not kappa or version != kappa._version) and bool(kappa.isfinite().all()):
            self._all_set = kappa, kappa._version
        return self._all_set[0] is kappa and self._all_set[1] == kappa._version

    def _update_bounds(self, measure: Tensor) -> None:
        state = self._state
        for part in self._parts:
            if isinstance(part.indices, slice):
                part.settings.bound.update_(state["kappa"], state["step"], measure, state)
                continue
            indices = self._indices(part)
            memory = part.settings.bound.memory(measure[indices])
            own = {key: state[key][indices] for key in ("kappa", *memory)}
            part.settings.bound.update_(own["kappa"], state["step"], measure[indices], own)
            for key, value in own.items():
                state[key][indices] = value

    @property
    def _default(self) -> CPRSettings:
        return CPRSettings(self.bound, self.regularizer, self.mu, self.adaptive)

    def _shared(self, name: str) -> Any:
        """Return a setting if all matrices share it, else the list of its values."""
        values = [getattr(s, name) for s in self.settings] or [getattr(self._default, name)]
        return values[0] if len(set(values)) == 1 else values

    def _on_device(self, setting: Any, dtype: torch.dtype) -> Any:
        """Return a result of :meth:`_shared`, a list as a vector ``[J]``."""
        return self._constant(id(setting), setting, dtype) if isinstance(setting, list) else setting

    def _indices(self, part: _Part) -> slice | Tensor:
        """Return the indices of the part's matrices."""
        if isinstance(part.indices, slice):
            return part.indices
        return self._constant(id(part), part.indices, torch.int64)

    def _numel(self) -> Tensor:
        """Return the numbers of elements, ``[J]``."""
        sizes = [p.numel() for p in self.parameters]
        return self._constant("numel", sizes, accumulator(self._device()))

    def _config(self) -> dict[str, Any]:
        """Return each setting, or the list of its values if the matrices differ."""
        each = [s.config() for s in self.settings] or [self._default.config()]
        values = {key: [config[key] for config in each] for key in each[0]}
        return {key: own[0] if len(set(own)) == 1 else own for key, own in values.items()}

    def __repr__(self) -> str:
        if len(self._parts) <= 1:
            return super().__repr__()
        return f"CPR({len(self.names)} matrices with {len(self._parts)} different settings)"


def _may_read(values: Tensor) -> bool:
    """Return True if reading values does not make the host wait, as for a GPU."""
    return values.device.type == "cpu"


@dataclass(frozen=True)
class _Part:
    """Matrices with the same settings.

    Attributes:
        indices: their indices among all matrices; a slice if these are all matrices.
    """

    settings: CPRSettings
    parameters: list[Tensor]
    indices: slice | list[int]


def _parts(settings: list[CPRSettings], parameters: list[Tensor]) -> list[_Part]:
    members: dict[CPRSettings, list[int]] = {}
    for j, own in enumerate(settings):
        members.setdefault(own, []).append(j)
    if len(members) == 1:
        return [_Part(settings[0], parameters, slice(None))]
    return [_Part(own, [parameters[j] for j in js], js) for own, js in members.items()]
