"""Exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]

WINDOW_SHARE = 0.1
"""Longest window of the average, as a share of the steps so far."""


class AveragedWeights:
    """Averaged weights of a network beside the weights that train; one of both is in the network.

    After each step the average moves by 1 / window towards the weights that train. The window is
    1 / (1 - decay) steps, but at most a tenth of the steps so far, so that short trainings have an
    average, too. Running statistics of normalization layers are averaged in the same way; other buffers
    are copied.

    At first both are equal, and the network has the averaged ones.

    Args:
        network: the network, not wrapped by ``torch.compile`` or for distributed training.
        decay: decay of the average per step, above 0 and below 1.

    Example:
        >>> network = nn.Linear(1, 1, bias=False)
        >>> averaged = AveragedWeights(network, decay=0.5)
        >>> for value in (1.0, 2.0):
        ...     averaged.use_training()
        ...     _ = network.weight.data.fill_(value)
        ...     averaged.update()
        >>> averaged.use_averaged()
        >>> network.weight.item()  # the window is one step in the first ten
        2.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network = network
        self._window = 1 / (1 - decay)
        # Beside the network: the average while it trains, otherwise the weights that train.
        self._beside = AveragedModel(network, multi_avg_fn=self._move, use_buffers=True)
        self._is_training = False

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self._beside.n_averaged)

    def update(self) -> None:
        """Move the average towards the weights that train, after a step."""
        self._beside.update_parameters(self._network)

    def _move(self, averaged: Tensors, current: Tensors, _: Any) -> None:
        window = max(1.0, min(self._window, WINDOW_SHARE * (self.steps + 1)))
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 / window)
        else:
            torch._foreach_copy_(averaged, current)

    def use_training(self) -> None:
        """Put the weights that train into the network."""
        if not self._is_training:
            self._exchange()

    def use_averaged(self) -> None:
        """Put the averaged weights into the network."""
        if self._is_training:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        beside = self._beside.module
        for ours, others in zip(
            chain(self._network.parameters(), self._network.buffers()),
            chain(beside.parameters(), beside.buffers()),
            strict=True,
        ):
            # In place, as compiled graphs and optimizers keep the memory of the weights.
            kept = ours.clone()
            ours.copy_(others)
            others.copy_(kept)
        self._is_training = not self._is_training

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that train, and the number of steps."""
        holder = self._network if self._is_training else self._beside.module
        return {"steps": self.steps, "weights": dict(holder.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the weights that train; the network has the averaged ones already.

        Raises:
            RuntimeError: they are of another network.
        """
        assert not self._is_training
        self._beside.module.load_state_dict(state_dict["weights"])
        self._beside.n_averaged.fill_(state_dict["steps"])
