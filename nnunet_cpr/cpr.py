"""Constrained Parameter Regularization, attached to any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr._attachment import Attached
from nnunet_cpr._device import to_device
from nnunet_cpr._distributed import Shards, local_parts
from nnunet_cpr._state_dict import short
from nnunet_cpr.bounds import Bound, KappaWS, as_bound
from nnunet_cpr.param_groups import Params, param_groups, select
from nnunet_cpr.regularizers import L2, Regularizer, accumulator, get_regularizer


@dataclass(frozen=True)
class Settings:
    """The settings of CPR for one matrix, see :class:`CPR`."""

    bound: Bound
    regularizer: Regularizer
    mu: float
    adaptive: bool

    KEYS: ClassVar[tuple[str, ...]] = ("kappa", "regularizer", "mu", "adaptive")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Read the settings from the values under :data:`KEYS`, as arguments or groups give them.

        Raises:
            TypeError: ``kappa`` is neither a bound nor a word, or ``adaptive`` is no bool.
            ValueError: a value that its setting cannot have.
        """
        mu, adaptive = given["mu"], given["adaptive"]
        limits = torch.finfo(torch.float32)  # the dtype of the multipliers
        if isinstance(mu, bool) or not isinstance(mu, (int, float)) or not abs(mu) <= limits.max:
            raise ValueError(f"mu must be a finite number, got {short(mu)}")
        if mu < limits.tiny:
            raise ValueError(f"mu must be positive, got {short(mu)}")
        if not isinstance(adaptive, bool):
            raise TypeError(f"adaptive must be True or False, got {short(adaptive)}")
        bound, regularizer = as_bound(given["kappa"]), get_regularizer(given["regularizer"])
        return cls(bound, regularizer, float(mu), adaptive)

    @property
    def largest_multiplier(self) -> float:
        """The largest multiplier that a correction uses."""
        return self.regularizer.largest_multiplier

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values that :meth:`of` reads, for parameter groups."""
        return {
            "kappa": str(self.bound),
            "regularizer": self.regularizer.name,
            "mu": self.mu,
            "adaptive": self.adaptive,
        }

    def config(self) -> dict[str, Any]:
        """Return the settings as a saved state has them."""
        return {**self.plain(), "kappa": repr(self.bound)}


class CPR(Attached):
    r"""Keeps a measure of every parameter matrix under an upper bound (the paper's Algorithm 1).

    Before each optimizer step t, for each of the J regularized matrices:

    .. math::
        r^j &= R(\theta_t^j) \\
        \lambda^j &\leftarrow \max(0,\ \lambda^j + \mu\,(r^j - \kappa^j)) \\
        \theta^j &\leftarrow \theta^j - \lambda^j\, g(\theta_t^j)

    and then the optimizer, whose own weight decay is 0, moves on. While a bound is not set it is
    +inf, and nothing happens to its matrix.

    A matrix whose parameter has no gradient in a step is left alone in that step, its multiplier too.
    So is one whose measure is not finite; that is counted in :meth:`metrics`. Gradients are not
    read: one that is not finite shows in the measure of the step after it. For ``l2`` the factor
    1 - 2 lambda stops at 0, which is counted as well. A step that ``GradScaler`` skips is no step.

    Args:
        params: a module, named parameters, parameters or parameter groups; see
            :mod:`nnunet_cpr.param_groups` for which of them are regularized. A group may set its own
            ``kappa``, ``regularizer``, ``mu`` and ``adaptive``.
        kappa: how the bounds are found, see :mod:`nnunet_cpr.bounds`; a bound or its word, such as
            ``KappaWS(1000)`` or ``"ws1000"``.
        regularizer: the regularization function R by its name (``l2``, ``l1``, ``std`` or ``huber``)
            or as an object, see :mod:`nnunet_cpr.regularizers`.
        mu: update rate of the multipliers.
        adaptive: AdaCPR (the paper's appendix on adaptive bounds): a bound is set to the present
            measure once its multiplier has fallen back to 0.

    Attributes:
        bound, regularizer, mu, adaptive: the settings of the groups that give none of their own.
        settings: one :class:`Settings` for each matrix, in the order of ``names``.

    Raises:
        TypeError: ``params`` or ``kappa`` is of the wrong kind.
        ValueError: unknown regularizer, or ``mu`` is not positive and finite.

    Warns:
        UserWarning: there is nothing to regularize.

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
        default = Settings.of(given)
        self.bound, self.regularizer = default.bound, default.regularizer
        self.mu, self.adaptive = default.mu, default.adaptive
        groups = param_groups(params)
        super().__init__(groups)
        self.settings = [Settings.of({**given, **group}) for _, _, group in select(groups)]
        self._parts = _parts(self.settings, self.parameters)
        self._shards = Shards(self.parameters, self.names)
        self._constants: dict[Any, tuple[Any, Tensor]] = {}
        self._mu = self._shared("mu")
        self._adaptive = self._shared("adaptive")
        self._limit = self._shared("largest_multiplier")

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
            memory = part.settings.bound.memory(vector[self._at(part)])
            assert own.isdisjoint(memory), "a bound's memory needs names of its own"
            for key, value in memory.items():
                everyone = self._state.setdefault(key, value.new_zeros(len(self.parameters)))
                everyone[self._at(part)] = value

    # What can be read

    @property
    def kappa(self) -> Tensor:
        """The bounds, float32 ``[J]`` in the order of ``names``; +inf where not set yet."""
        return self._state["kappa"].clone()

    @property
    def lagrange_multiplier(self) -> Tensor:
        """The multipliers lambda, float32 ``[J]`` in the order of ``names``."""
        return self._state["lagrange_multiplier"].clone()

    @property
    @torch.no_grad()
    def measure(self) -> Tensor:
        """R of the parameters as they are now, float32 ``[J]`` in the order of ``names``."""
        return self._measure_from(self._sums())

    def metrics(self) -> dict[str, float]:
        """What to log.

        ``measure_to_kappa``: mean of R / kappa over the matrices whose bound is set (NaN if none is);
        ``lagrange_multiplier_mean`` and ``_max``; ``bounded`` and ``active``: the fractions of
        matrices with a bound and with a positive multiplier; ``skipped_updates``: matrix updates left
        out because a number was not finite; ``limited_corrections``: corrections that stopped at the
        measure's largest multiplier, both counted from the start. Waits for a GPU.
        """
        measure, kappa, multiplier = self.measure, self.kappa, self.lagrange_multiplier
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

    # The update

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        """Take one update by hand, just before the parameters move.

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
                local_parts(part.parameters), multiplier[self._at(part)], own, numel[self._at(part)]
            )

    def _sums(self) -> list[Tensor]:
        """Return the sums that each part's R is a function of, over the elements of all processes."""
        self._follow_device()
        own = [part.settings.regularizer.sums(local_parts(part.parameters)) for part in self._parts]
        if len(own) <= 1:
            return [self._shards.total(sums) for sums in own]
        # One tensor for all parts, so that one all-reduce serves them.
        together = own[0].new_zeros(max(len(sums) for sums in own), len(self.parameters))
        for part, sums in zip(self._parts, own):
            together[: len(sums), self._at(part)] = sums
        together = self._shards.total(together)
        return [together[: len(sums), self._at(part)] for part, sums in zip(self._parts, own)]

    def _measure_from(self, sums: list[Tensor]) -> Tensor:
        """Return R of each matrix, float32 ``[J]``."""
        numel = self._numel()
        values = [
            part.settings.regularizer.measure(own, numel[self._at(part)])
            for part, own in zip(self._parts, sums)
        ]
        if len(values) == 1:
            return values[0]
        measure = torch.zeros(len(self.parameters), dtype=torch.float32, device=self._device())
        for part, value in zip(self._parts, values):
            measure[self._at(part)] = value
        return measure

    def update(self, measure: Tensor, found_inf: Tensor | None = None) -> Tensor:
        """Update bounds and multipliers (Algorithm 1) without waiting for a GPU.

        Args:
            measure: R(theta_t), float32 ``[J]``.
            found_inf: not 0 where ``GradScaler`` skips the step; a number on the device, or None. In a
                step that is skipped no measure can be used.

        Returns:
            The multipliers to correct with, float32 ``[J]``; 0 where nothing is to be corrected.
        """
        self._follow_device()
        state = self._state
        kappa, multiplier = state["kappa"], state["lagrange_multiplier"]
        has_grad = self._has_grad()
        taken = None if found_inf is None else found_inf.to(measure.device).reshape(()) == 0
        if taken is not None:
            measure = torch.where(taken, measure, math.nan)
            has_grad = taken if has_grad is None else has_grad & taken

        self._update_bounds(measure)

        growth = self._on_device(self._mu, torch.float32)
        excess = measure - kappa
        proposed = (
            torch.add(multiplier, growth * excess)
            if isinstance(growth, Tensor)
            else torch.add(multiplier, excess, alpha=growth)
        ).clamp_(min=0)
        finite = proposed.isfinite()
        updated = finite if has_grad is None else has_grad & finite
        applied = torch.where(updated, proposed, 0.0)

        adaptive = self._on_device(self._adaptive, torch.bool)
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
        limit = self._on_device(self._limit, torch.float32)
        if isinstance(limit, Tensor) or limit < math.inf:
            state["limited_corrections"] += (applied > limit).sum()
            applied.clamp_(max=limit)
        return applied

    def _update_bounds(self, measure: Tensor) -> None:
        state = self._state
        for part in self._parts:
            if isinstance(part.where, slice):
                part.settings.bound.update_(state["kappa"], state["step"], measure, state)
                continue
            where = self._at(part)
            memory = part.settings.bound.memory(measure[where])
            own = {key: state[key][where] for key in ("kappa", *memory)}
            part.settings.bound.update_(own["kappa"], state["step"], measure[where], own)
            for key, value in own.items():
                state[key][where] = value

    @property
    def _default(self) -> Settings:
        return Settings(self.bound, self.regularizer, self.mu, self.adaptive)

    def _shared(self, name: str) -> Any:
        """Return a setting that all matrices share, or the list of its values."""
        values = [getattr(s, name) for s in self.settings] or [getattr(self._default, name)]
        return values[0] if len(set(values)) == 1 else values

    def _on_device(self, setting: Any, dtype: torch.dtype) -> Any:
        """Return what :meth:`_shared` gave, a list as a vector ``[J]``."""
        return self._constant(id(setting), setting, dtype) if isinstance(setting, list) else setting

    def _at(self, part: _Part) -> slice | Tensor:
        """Return the places of the part's matrices among all."""
        if isinstance(part.where, slice):
            return part.where
        return self._constant(id(part), part.where, torch.int64)

    def _constant(self, name: Any, values: list[Any], dtype: torch.dtype) -> Tensor:
        """Return ``values`` as a vector on the device, where it stays; a GPU is not waited for."""
        device = self._device()
        known, vector = self._constants.get(name, (None, None))
        if vector is None or known != values or vector.device != device:
            vector = to_device(values, dtype, device)
            self._constants[name] = values, vector
        return vector

    def _numel(self) -> Tensor:
        """Return the numbers of elements, ``[J]``; on a GPU they stay there."""
        sizes, device = [p.numel() for p in self.parameters], self._device()
        if device.type == "cpu":
            return torch.tensor(sizes, dtype=accumulator(device), device=device)
        return self._constant("numel", sizes, accumulator(device))

    def l2_from(self, sums_of_squares: Tensor) -> Tensor:
        """Return ``l2`` of the matrices from the sums of squares of this process's elements, ``[J]``."""
        return L2().measure(self._shards.total(sums_of_squares[None]), self._numel())

    # With an optimizer

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        if getattr(optimizer, "cpr", None) is self:  # SGDCPR and AdamCPR run theirs themselves
            return []
        return super()._step_hooks(optimizer)

    def _config(self) -> dict[str, Any]:
        """Return each setting, or the list of its values if the matrices differ in it."""
        each = [s.config() for s in self.settings] or [self._default.config()]
        values = {key: [config[key] for config in each] for key in each[0]}
        return {key: own[0] if len(set(own)) == 1 else own for key, own in values.items()}

    def __repr__(self) -> str:
        if len(self._parts) <= 1:
            return super().__repr__()
        return f"CPR({len(self.names)} matrices with {len(self._parts)} different settings)"


@dataclass(frozen=True)
class _Part:
    """The matrices that share their settings.

    Attributes:
        where: their places among all matrices; a slice if these are all matrices.
    """

    settings: Settings
    parameters: list[Tensor]
    where: slice | list[int]


def _parts(settings: list[Settings], parameters: list[Tensor]) -> list[_Part]:
    members: dict[Settings, list[int]] = {}
    for j, own in enumerate(settings):
        members.setdefault(own, []).append(j)
    if len(members) == 1:
        return [_Part(settings[0], parameters, slice(None))]
    return [_Part(own, [parameters[j] for j in js], js) for own, js in members.items()]
