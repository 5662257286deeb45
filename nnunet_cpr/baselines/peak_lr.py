"""Weight decays relative to the highest learning rate: corrected (AdamC, SGDC) and independent."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr._validation import list_names, positive_number
from nnunet_cpr.baselines.decoupled import DecoupledDecay
from nnunet_cpr.baselines.normalized_matrices import matrices_before_normalization
from nnunet_cpr.param_groups import Params, unwrap


class IndependentDecay(DecoupledDecay):
    r"""Weight decay that follows the schedule of the learning rate, but not its size.

    .. math::
        \theta \leftarrow (1 - \mathrm{wd}\, \mathrm{lr} / \mathrm{lr}_{\max})\, \theta

    This is the update of AdamW with the schedule multiplier :math:`\eta_t = \mathrm{lr} /
    \mathrm{lr}_{\max}` apart from the step size (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2,
    line 12), which optimi implements as ``decouple_lr``. A coefficient of AdamW corresponds to the
    coefficient times the highest learning rate here.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        weight_decay: share of a matrix that a step with the highest learning rate subtracts.
        max_lr: highest learning rate of the training. By default that of each parameter group when this
            method is attached for the first time: its ``max_lr`` or ``initial_lr``, which schedulers of
            torch set, else its ``lr``.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or a setting is negative or
            not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = IndependentDecay(model, weight_decay=1e-5).attach(optimizer)
    """

    def __init__(self, params: Params, weight_decay: float = 1e-5, max_lr: float | None = None) -> None:
        super().__init__(params, weight_decay)
        self.max_lr = None if max_lr is None else positive_number("max_lr", max_lr)
        self._state["max_lr"] = self._zeros_per_matrix()

    def _config(self) -> dict[str, Any]:
        return {"max_lr": self.max_lr, **super()._config()}

    def attach(self, optimizer: Optimizer) -> Optimizer:
        super().attach(optimizer)
        highest = [self._highest(group) for group in optimizer.param_groups]
        by_id = {id(p): lr for g, lr in zip(optimizer.param_groups, highest) for p in g["params"]}
        state = self._state["max_lr"]  # not 0 if the method was attached before
        rates = [lr or by_id[id(p)] for p, lr in zip(self.parameters, state.tolist())]
        unknown = [name for name, lr in zip(self.names, rates) if not lr > 0]
        if unknown:
            self.detach()
            raise ValueError(
                f"max_lr: expected the highest learning rate of {list_names(unknown)}, which have a "
                "learning rate of 0 in the optimizer; give max_lr"
            )
        self._state["max_lr"] = torch.tensor(rates, dtype=state.dtype, device=state.device)
        return optimizer

    def _highest(self, group: dict[str, Any]) -> float:
        if self.max_lr is not None:
            return self.max_lr
        return float(group.get("max_lr", group.get("initial_lr", group["lr"])))

    def _rates(self) -> Tensor:
        return super()._rates() / self._state["max_lr"]


class CorrectedDecay(IndependentDecay):
    r"""Decoupled weight decay, proportional to the square of the learning rate for normalized matrices.

    A matrix that is followed by a normalization decays by

    .. math::
        \theta \leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, \mathrm{lr} / \mathrm{lr}_{\max})\, \theta

    and every other one as in :class:`DecoupledDecay` (Defazio, arXiv 2506.02285: AdamC and SGDC). The
    ratio of the norms of gradient and weights then does not depend on the schedule. The formula is
    that of timm's ``corrected_weight_decay``, which applies it to all parameters.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`; a module unless ``normalized`` is given.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        max_lr: as in :class:`IndependentDecay`.
        normalized: names of the matrices that are followed by a normalization. By default they are found
            in the graph of the module, see :func:`matrices_before_normalization`. The paper counts all
            matrices but the output layer's.

    Raises:
        TypeError, ValueError: as :class:`IndependentDecay`, or ``normalized`` has a name that is not
            that of a regularized matrix, or is not given without a module.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> decay = CorrectedDecay(model, weight_decay=1e-4)
        >>> optimizer = decay.attach(optimizer)
        >>> decay.normalized
        ['0.weight']
    """

    def __init__(
        self,
        params: Params,
        weight_decay: float = 1e-2,
        max_lr: float | None = None,
        normalized: Iterable[str] | None = None,
    ) -> None:
        super().__init__(params, weight_decay, max_lr)
        if normalized is not None:
            chosen = set(normalized)
            unknown = sorted(chosen - set(self.names))
            if unknown:
                raise ValueError(
                    f"normalized: expected names of regularized matrices, got {list_names(unknown)}"
                )
            self._is_normalized = [name in chosen for name in self.names]
        elif isinstance(params, nn.Module):
            found = matrices_before_normalization(unwrap(params))
            self._is_normalized = [id(p) in found for p in self.parameters]
        else:
            raise ValueError(
                "normalized: expected the names of the matrices that are followed by a normalization, "
                "got None; give them, or give the module as params"
            )
        if self.names and not any(self._is_normalized):
            warnings.warn(
                "no matrix is followed by a normalization, so CorrectedDecay decays like DecoupledDecay",
                stacklevel=2,
            )

    @property
    def normalized(self) -> list[str]:
        """Names of the matrices that are followed by a normalization."""
        return [name for name, is_normalized in zip(self.names, self._is_normalized) if is_normalized]

    def __repr__(self) -> str:
        count = f"{len(self.names)} matrices, {len(self.normalized)} normalized"
        return f"{self.title}({count}, weight_decay={self.weight_decay}, max_lr={self.max_lr})"

    def _config(self) -> dict[str, Any]:
        return {"normalized": self._is_normalized, **super()._config()}

    def _rates(self) -> Tensor:
        rates = DecoupledDecay._rates(self)
        is_normalized = self._constant("is_normalized", self._is_normalized, torch.bool)
        return torch.where(is_normalized, rates * super()._rates(), rates)
