"""Comparison methods whose weight decay depends on gradients or on the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nnunet_cpr.baselines._base import total_norm
from nnunet_cpr.baselines._decays import DecoupledDecay, Sums
from nnunet_cpr.cpr.regularizers import clamp_to_finite


class AdaptiveWeightDecay(DecoupledDecay):
    r"""Weight decay in proportion to the norm of the gradient.

    The coefficient follows the ratio of two norms over all regularized matrices (Ghiasi et al., arXiv
    2210.00094):

    .. math::
        \bar\lambda &\leftarrow 0.1\, \bar\lambda + 0.9\, \mathrm{wd}\, \|g\|\, /\, \|\theta\| \\
        \theta &\leftarrow (1 - \mathrm{lr}\, \bar\lambda)\, \theta

    A step in which the ratio is not finite changes neither the coefficient nor the parameters.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: ratio between the norms of the decay and the gradient, the paper's lambda_awd.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaptiveWeightDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    _scalar_state = ("coefficient",)

    def _coefficients(self, sums_of_squares: Sums, taken: Tensor) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        has_grad = self._constant("has_grad", [p.grad is not None for p in self.parameters], torch.bool)
        norm = torch.where(has_grad, sums_of_squares(), 0).sum().sqrt().float()
        ratio = total_norm(gradients) / norm  # NaN without any gradient
        scale = getattr(self._optimizer, "grad_scale", None)  # GradScaler leaves it to fused optimizers
        if scale is not None:
            ratio = ratio / scale.to(ratio)
        present = self._state["coefficient"]
        proposed = 0.1 * present + 0.9 * self.weight_decay * ratio
        is_used = proposed.isfinite() & (taken == 1)
        torch.where(is_used, proposed, present, out=present)
        return torch.where(is_used, proposed, 0)


@dataclass(eq=False, repr=False)
class AdaDecay(DecoupledDecay):
    r"""Weight decay that is stronger for elements with larger gradients.

    In each matrix the absolute gradients are standardized and passed through a sigmoid (Nakamura and
    Hong, arXiv 1907.08931, section on the adaptive rate); an average element has the rate 1:

    .. math::
        \theta &\leftarrow (1 - \mathrm{lr}\, \mathrm{wd}\, s)\, \theta \\
        s &= 2\, /\, (1 + \exp(-\alpha\, (|g| - \mathrm{mean}\,|g|)\, /\, \mathrm{std}\,|g|))

    A matrix with gradients that are not finite is not changed in that step.

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.
        alpha: steepness of the sigmoid; 0 gives decoupled weight decay. CPR's authors compare 1, 2, 4
            and 8.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or a setting is negative
            or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)
    """

    alpha: float = 4.0

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        for p, decay in self._decays(found_inf):
            assert p.grad is not None
            absolute = p.grad.abs().to(torch.promote_types(p.grad.dtype, torch.float32))
            std, mean = torch.std_mean(absolute, correction=0)
            # Equal gradients have the rate 1 and not NaN.
            standard = (absolute - mean) / torch.where(std > 0, std, 1)
            rate = 2 * torch.sigmoid(self.alpha * standard)
            rate = torch.where(std.isfinite(), rate, 0)
            p.addcmul_(clamp_to_finite(p), (decay.to(rate) * rate).to(p), value=-1)
        yield


class CautiousDecay(DecoupledDecay):
    r"""Decoupled weight decay of the elements that the optimizer moves towards zero, or not at all.

    With the optimizer's update u, so that the optimizer alone gives theta - lr u (Chen et al., arXiv
    2510.12402, Algorithm 1):

    .. math::
        \theta \leftarrow \theta - \mathrm{lr}\, (u + \mathrm{wd}\, [u \theta \ge 0]\, \theta)

    Args:
        params: as in :class:`~nnunet_cpr.CPR`.
        weight_decay: coefficient, multiplied by the learning rate of each step.

    Raises:
        TypeError, ValueError: ``params`` as in :class:`~nnunet_cpr.CPR`, or ``weight_decay`` is
            negative or not finite.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = CautiousDecay(model, weight_decay=1e-2).attach(optimizer)
    """

    has_decay = False

    def _around_step(self, found_inf: Tensor | None) -> Iterator[None]:
        before = [(p, p.clone(), decay) for p, decay in self._decays(found_inf)]
        yield
        for p, old, decay in before:
            # By comparison, since a difference or a product of small numbers may round to 0.
            agrees = torch.where(old >= 0, p <= old, p >= old)
            p.addcmul_(clamp_to_finite(old), agrees * decay.to(p), value=-1)
