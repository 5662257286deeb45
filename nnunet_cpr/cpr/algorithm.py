"""Constrained Parameter Regularization for any torch optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nnunet_cpr.cpr.bounds import Bound, KappaKI0, KappaWS, as_bound
from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.cpr.multipliers import Decays, next_multipliers
from nnunet_cpr.cpr.regularized_parameters import Params, param_groups, select
from nnunet_cpr.cpr.regularizers import L2, Regularizer, accumulator, get_regularizer
from nnunet_cpr.cpr.shards import Shards, local_tensors
from nnunet_cpr.cpr.tensors import to_device
from nnunet_cpr.refusals import list_names, positive_number, short_repr


@dataclass(frozen=True)
class CPRSettings:
    """Settings of CPR for one parameter matrix, see :class:`CPR`."""

    kappa: Bound
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
        mu = positive_number("mu", given["mu"], float32=True)  # the dtype of the multipliers
        regularizer, adaptive = get_regularizer(given["regularizer"]), given["adaptive"]
        if not isinstance(adaptive, bool):
            raise TypeError(f"adaptive: expected True or False, got {short_repr(adaptive)}")
        return cls(as_bound(given["kappa"]), regularizer, mu, adaptive)

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values that :meth:`parse` reads, for parameter groups."""
        return {**vars(self), "kappa": str(self.kappa), "regularizer": self.regularizer.name}


@dataclass(frozen=True, eq=False)
class _Part:
    """Consecutive matrices with the same settings.

    Attributes:
        index: their indices among all matrices.
        numel: their numbers of elements.
        shards: distribution of their elements over processes.
    """

    settings: CPRSettings
    index: slice
    numel: Tensor
    shards: Shards


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
        CPR(1 matrix, kappa=KappaWS(steps=1000), regularizer=l2, mu=1.0, adaptive=False)
    """

    warns_of_unset_bounds = True
    """False: no warning of bounds that are not set; nnU-Net's trainers judge them at their end."""

    title = "CPR"
    state_key = "cpr"
    setting_keys = CPRSettings.KEYS

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
        self.bound, self.regularizer = default.kappa, default.regularizer
        self.mu, self.adaptive = default.mu, default.adaptive
        groups = param_groups(params)
        super().__init__(groups)
        self.settings = [CPRSettings.parse({**given, **group}) for _, _, group in select(groups)]
        self._parts = self._build_parts()
        self._mu = np.array([own.mu for own in self.settings], np.float32)
        self._told: set[str] = set()  # kinds of warnings that were given
        self.has_decay = all(type(own.regularizer) is L2 for own in self.settings)

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
        for part in self._parts:
            like = torch.zeros_like(part.numel, dtype=torch.float32)
            for key, value in part.settings.kappa.memory(like).items():
                all_matrices = self._state.setdefault(key, value.new_zeros(len(self.parameters)))
                all_matrices[part.index] = value
        self._warn_of_zeros()

    def _warn_of_zeros(self) -> None:
        """Warn of matrices whose bound is a multiple of an initial R that is 0."""
        is_relative = [isinstance(own.kappa, KappaKI0) for own in self.settings]
        is_elsewhere = any(part.shards.reductions for part in self._parts)
        if not any(is_relative) or is_elsewhere or any(p.is_meta for p in self.parameters):
            return
        measured = zip(self.names, is_relative, self.measure.tolist())
        if names := [name for name, is_found, r in measured if is_found and r == 0]:
            warnings.warn(
                f"params: R of {list_names(names)} is 0, so that its bound would be 0, too, and it "
                "would stay near 0; give it another bound than ki0, such as ws1000, in a group of its "
                "own",
                stacklevel=3,
            )

    def _build_parts(self) -> list[_Part]:
        device = self._state["step"].device
        parts, start = [], 0
        for settings, members in groupby(self.settings):
            index = slice(start, start + len(list(members)))
            start = index.stop
            numels = [p.numel() for p in self.parameters[index]]
            numel = to_device(numels, accumulator(device), device)
            shards = Shards(self.parameters[index], self.names[index])
            parts.append(_Part(settings, index, numel, shards))
        return parts

    def move_state_to_parameters(self) -> None:
        before = self._state["step"].device
        super().move_state_to_parameters()
        if self._state["step"].device != before:
            self._parts = self._build_parts()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*CPRSettings.KEYS, "bound", "settings") and hasattr(self, name):
            raise AttributeError(
                f"{name} of CPR: expected no change after construction, got {short_repr(value)}; "
                "build a new CPR"
            )
        super().__setattr__(name, value)

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
        self.move_state_to_parameters()
        measure = torch.zeros(len(self.parameters), dtype=torch.float32, device=self._device())
        for part in self._parts:
            measure[part.index] = part.settings.regularizer.measure(self._sums(part), part.numel)
        return measure

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

        Warns:
            UserWarning: a multiplier will be limited in the next steps, too, whatever they do.
        """
        self._warn_of_limited()
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see :meth:`RegularizationMethod.state_dict`.

        Warns:
            UserWarning: no bound is set after all steps so far, or as :meth:`metrics` does.
        """
        self._warn_of_limited()
        steps = self.step_count
        is_unset = bool(self.names) and steps > 0 and bool(self._state["kappa"].isinf().all())
        if is_unset and self.warns_of_unset_bounds:
            self._warn_once(
                "unset",
                f"kappa={str(self.bound)!r}: no bound is set after step {steps}, so that nothing is "
                "regularized yet; for a training that is not much longer choose a bound that is set "
                f"earlier, such as kappa='ws{max(steps // 5, 1)}'",
            )
        return super().state_dict()

    def _warn_of_limited(self) -> None:
        """Warn of multipliers that are above their limits by more than a step can reduce them."""
        limit = np.array([own.regularizer.largest_multiplier for own in self.settings], np.float32)
        if "limited" in self._told or np.isinf(limit).all():
            return
        kappa, multiplier = self.kappa.cpu().numpy(), self.lagrange_multiplier.cpu().numpy()
        is_set = np.isfinite(kappa)
        least = np.where(is_set, self._mu * kappa, 0)  # a step reduces a multiplier at most by this
        is_limited = is_set & (multiplier - least > limit)
        if is_limited.any():
            names = [name for name, found in zip(self.names, is_limited) if found]
            with np.errstate(divide="ignore", over="ignore"):
                steps = ((multiplier - limit) / least)[is_limited].max()
            self._warn_once(
                "limited",
                f"R of {list_names(names)} was so far above its bound that the multiplier, "
                f"{multiplier[is_limited].max():.3g}, is limited to {limit[is_limited].min():g} in each "
                f"of the next {steps:,.0f} steps, which set the weights to 0; go back to a checkpoint "
                "from before the weights grew, with a lower learning rate or mu",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, stacklevel=4)

    # Update

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        """Update and correct, in a loop without an optimizer that this is attached to.

        Call it after the backward pass, just before the parameters are updated.

        Args:
            found_inf: flag of ``GradScaler``, a scalar tensor; if it is not 0, the step is skipped and
                nothing is changed.

        Raises:
            RuntimeError: CPR is attached to an optimizer, whose steps do this.
        """
        if self.optimizer is not None:
            raise RuntimeError(
                "CPR is attached to an optimizer, whose step regularizes; leave step() out"
            )
        self.move_state_to_parameters()
        self.update_and_correct(found_inf)

    @torch.no_grad()
    def update_and_correct(self, found_inf: Tensor | None) -> None:
        for part, sums, multiplier in self._update(found_inf):
            params = local_tensors(self.parameters[part.index])
            part.settings.regularizer.correct_(params, multiplier, sums, part.numel)

    def decays(self) -> Decays:
        if self._state["step"].device != self.parameters[0].device:
            self.move_state_to_parameters()
        # Views of the state. The cache is cold between steps, where NumPy takes less time than torch.
        state = {key: value.numpy() for key, value in self._state.items()}
        step, kappa = int(state["step"]), state["kappa"]
        for part in self._parts:
            is_due = part.settings.kappa.is_due(step, kappa[part.index])
            if is_due or part.settings.adaptive or part.shards.reductions:
                # R of all matrices first, in a pass of its own.
                multipliers = [multiplier for _, _, multiplier in self._update(None)]
                return Decays.given((2 * torch.cat(multipliers)).numpy())
        state["step"][()] += 1
        return Decays(
            value=np.zeros(len(self.settings), np.float32),
            kappa=kappa,
            mu=self._mu,
            limit=np.float32(L2.largest_multiplier),
            multiplier=state["lagrange_multiplier"],
            skipped=state["skipped_updates"].reshape(1),
            limited=state["limited_corrections"].reshape(1),
        )

    def _update(self, found_inf: Tensor | None) -> list[tuple[_Part, Tensor, Tensor]]:
        """Take the paper's Algorithm 1 up to the correction. It does not wait for a GPU.

        Args:
            found_inf: as in :meth:`update_and_correct`.

        Returns:
            The parts, their sums, and the multipliers of their corrections, 0 for matrices that are not
            corrected.
        """
        has_step = self._constant("has_grad", [p.grad is not None for p in self.parameters], torch.bool)
        is_taken = None  # a step that GradScaler cannot skip
        if found_inf is not None:
            is_taken = found_inf.to(has_step.device).reshape(()) == 0
            has_step = has_step & is_taken
        updated = []
        for part in self._parts:
            sums = self._sums(part)
            r = part.settings.regularizer.measure(sums, part.numel)
            if is_taken is not None:
                r = torch.where(is_taken, r, math.nan)  # sets no bound
            updated.append((part, sums, self._update_part(part, r, has_step[part.index])))
        self._state["step"] += 1 if is_taken is None else is_taken
        return updated

    def _update_part(self, part: _Part, r: Tensor, has_step: Tensor) -> Tensor:
        """Update bounds and multipliers of matrices with the same settings, see :meth:`_update`.

        Args:
            part: the matrices; the rest is of these.
            r: R of each, NaN in a skipped step, ``[J]``.
            has_step: False for matrices without a gradient, and in a skipped step, ``[J]``.
        """
        settings = part.settings
        is_whole = len(self._parts) == 1
        state = {
            key: value if is_whole or not value.ndim else value[part.index]  # views
            for key, value in self._state.items()
        }
        kappa, multiplier = state["kappa"], state["lagrange_multiplier"]
        settings.kappa.update_(kappa, state["step"], r, state)
        limit = settings.regularizer.largest_multiplier
        moved, applied, is_updated = next_multipliers(multiplier, settings.mu, r, kappa, limit, has_step)
        if "was_positive" in state:  # kept for all matrices if any has an adaptive bound
            was_positive = state["was_positive"]
            if settings.adaptive:
                has_fallen_back = is_updated & (multiplier == 0) & was_positive
                torch.where(has_fallen_back, r, kappa, out=kappa)
            torch.where(is_updated, multiplier > 0, was_positive, out=was_positive)
        multiplier.copy_(moved)
        state["skipped_updates"] += (has_step & ~is_updated & (kappa < math.inf)).sum()
        state["limited_corrections"] += (is_updated & (moved > limit)).sum()
        return applied

    def _sums(self, part: _Part) -> Tensor:
        """Return the sums over all elements of matrices that R needs, ``[rows, J]``."""
        local = part.settings.regularizer.sums(local_tensors(self.parameters[part.index]))
        return part.shards.total(local)

    # Settings

    def check_settings(self, groups: list[dict[str, Any]], keys: Sequence[str]) -> None:
        settings = {id(p): own for p, own in zip(self.parameters, self.settings)}
        for i, group in enumerate(groups):
            # torch.load reads plain values with weights_only=True.
            if "kappa" in keys and isinstance(group.get("kappa"), Bound):
                group["kappa"] = str(group["kappa"])
            if "regularizer" in keys and isinstance(group.get("regularizer"), Regularizer):
                group["regularizer"] = group["regularizer"].name
            given = {key: group[key] for key in keys if key in group}
            for mine in {settings[id(p)] for p in group["params"] if id(p) in settings}:
                for key, value in given.items():
                    built = mine.plain()[key]
                    if value != built and CPRSettings.parse({**vars(mine), key: value}) != mine:
                        raise ValueError(
                            f"parameter group {i}: expected {key}={built!r}, with which CPR was built, "
                            f"got {value!r}; leave it out, or build CPR with the optimizer's "
                            "param_groups"
                        )

    def _config(self) -> dict[str, Any]:
        """Return each setting, or the list of its values if the matrices differ."""
        default = CPRSettings(self.bound, self.regularizer, self.mu, self.adaptive)
        each = [{**own.plain(), "kappa": repr(own.kappa)} for own in self.settings or [default]]
        values = {key: [config[key] for config in each] for key in CPRSettings.KEYS}
        return {key: own[0] if len(set(own)) == 1 else own for key, own in values.items()}

    def __repr__(self) -> str:
        count = len(set(self.settings))
        if count > 1:
            return f"CPR({len(self.names)} matrices with {count} different settings)"
        return super().__repr__()
