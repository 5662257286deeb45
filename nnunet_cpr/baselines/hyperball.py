"""Hyperball: fixed norms of each matrix and of its update (Wen et al., arXiv 2606.16899)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._validation import positive_number
from nnunet_cpr.baselines._base import UpdateBaseline, norms, total_norm
from nnunet_cpr.param_groups import Params


class Hyperball(UpdateBaseline):
    r"""Fixed norm of each matrix, and of its update relative to the learning rate.

    With the optimizer's update u, N(x) = x / norm(x), and the radius R of a matrix (the paper's update
    rule, also in NVIDIA's Emerging Optimizers, ``muon_hyperball``):

    .. math::
        \theta \leftarrow R\, N(\theta - \mathrm{lr}\, R\, N(u))

    The learning rate is thus the length of a step relative to the norm of the matrix. Where a norm is 0
    or not finite, the result of the optimizer is kept; a matrix of zeros gets its radius once it has a
    norm.

    Args:
        params: as in :class:`~nnunet_cpr.cpr.CPR`.
        factor: R as a multiple of the initial norm of the matrix.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.cpr.CPR`, or ``factor`` is not
            positive and finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        >>> optimizer = Hyperball(model).attach(optimizer)
    """

    def __init__(self, params: Params, factor: float = 1.0) -> None:
        super().__init__(params)
        self.factor = positive_number("factor", factor)
        self._state["radius"] = self._zeros_per_matrix()  # 0 until it is set

    def _config(self) -> dict[str, Any]:
        return {"factor": self.factor}

    @torch.no_grad()
    def _update_and_correct(self, found_inf: Tensor | None) -> None:
        radius = self._state["radius"]
        # On a GPU the host would wait for the answer.
        if radius.device.type != "cpu" or bool((radius == 0).any()):
            norm = norms(self.parameters)
            is_set = (radius == 0) & norm.isfinite() & (self._taken(found_inf) == 1)
            torch.where(is_set, self.factor * norm, radius, out=radius)
        super()._update_and_correct(found_inf)

    def _correct_update(self, index: int, before: Tensor, lr: float | Tensor, taken: Tensor) -> None:
        p, radius = self.parameters[index], self._state["radius"][index].to(before.device)
        if before.dtype.itemsize < 4:
            before = before.float()
        update = before - p
        size = total_norm([update])
        moved = before.addcmul(update, (lr * radius / size).to(update), value=-1)
        scale = radius / total_norm([moved])
        is_used = (size > 0) & (scale > 0) & scale.isfinite() & (taken.to(size.device) == 1)
        p.copy_(torch.where(is_used, moved.mul_(scale.to(moved)), p))
