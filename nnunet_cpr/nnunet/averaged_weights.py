"""Exponential moving average of a network's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nnunet_cpr.cpr.regularizers import accumulator

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
        self._beside = copy.deepcopy(network)
        device = next(network.parameters()).device
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._is_training = False

    @property
    def steps(self) -> int:
        """Number of steps so far. Waits for a GPU."""
        return int(self._steps)

    @torch.no_grad()
    def update(self, is_taken: Tensor | None = None) -> None:
        """Move the average towards the weights that train, after a step, without waiting for a GPU.

        Args:
            is_taken: False, a scalar, after a step that ``GradScaler`` has skipped; None for True.
        """
        is_taken = torch.ones_like(self._steps, dtype=torch.bool) if is_taken is None else is_taken
        is_taken = is_taken.to(self._steps.device).reshape(())
        self._steps += is_taken
        longest = WINDOW_SHARE * self._steps.to(accumulator(self._steps.device))
        weight = torch.where(is_taken, 1 / longest.clamp(1, self._window), 0)
        weights: dict[Any, Tensor] = {}  # by device and dtype
        for averaged, current in self._pairs():
            kind = averaged.device, averaged.dtype
            if averaged.is_floating_point():
                if kind not in weights:
                    weights[kind] = weight.to(*kind)
                averaged.lerp_(current, weights[kind])
            else:
                averaged.copy_(torch.where(is_taken.to(averaged.device), current, averaged))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor beside the network and that in it."""
        return zip(
            chain(self._beside.parameters(), self._beside.buffers()),
            chain(self._network.parameters(), self._network.buffers()),
            strict=True,
        )

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
        for others, ours in self._pairs():
            # In place, as compiled graphs and optimizers keep the memory of the weights.
            kept = ours.clone()
            ours.copy_(others)
            others.copy_(kept)
        self._is_training = not self._is_training

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that train, and the number of steps."""
        holder = self._network if self._is_training else self._beside
        return {"steps": self.steps, "weights": dict(holder.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the weights that train; the network has the averaged ones already.

        Raises:
            RuntimeError: they are of another network.
        """
        assert not self._is_training
        self._beside.load_state_dict(state_dict["weights"])
        self._steps.fill_(state_dict["steps"])
