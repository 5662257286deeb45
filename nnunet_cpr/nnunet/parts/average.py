"""Averaged weights in a second network, which is validated and saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr.cpr.regularizers import accumulator
from nnunet_cpr.names.training import describe_average
from nnunet_cpr.nnunet.parts.part import Part, unwrapped
from nnunet_cpr.refusals import Refusal

WINDOW_SHARE = 0.1
"""Longest window of the average, as a share of the steps so far."""


class AveragedWeights:
    """Averaged weights of a network, in a copy of it.

    After each step the average moves by 1 / window towards the weights that train. The window is
    1 / (1 - decay) steps, but at most a tenth of the steps so far, so that short trainings have an
    average, too. Running statistics of normalization layers are averaged in the same way; other buffers
    are copied.

    Args:
        network: the network, not wrapped by ``torch.compile`` or for distributed training.
        decay: decay of the average per step, above 0 and below 1.

    Attributes:
        network: network with the averaged weights, in evaluation mode.

    Example:
        >>> network = nn.Linear(1, 1, bias=False)
        >>> averaged = AveragedWeights(network, decay=0.5)
        >>> for value in (1.0, 2.0):
        ...     _ = network.weight.data.fill_(value)
        ...     averaged.update(network)
        >>> averaged.network.weight.item()  # the window is one step in the first ten
        2.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False).eval()
        self._window = 1 / (1 - decay)
        device = next(network.parameters()).device
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def steps(self) -> int:
        """Number of steps so far. Waits for a GPU."""
        return int(self._steps)

    @steps.setter
    def steps(self, number: int) -> None:
        self._steps.fill_(number)

    @torch.no_grad()
    def update(self, network: nn.Module, is_taken: Tensor | None = None) -> None:
        """Move the average towards the weights that train, after a step, without waiting for a GPU.

        Args:
            network: the network that trains.
            is_taken: False, a scalar, after a step that ``GradScaler`` has skipped; None for True.
        """
        is_taken = torch.ones_like(self._steps, dtype=torch.bool) if is_taken is None else is_taken
        is_taken = is_taken.to(self._steps.device).reshape(())
        self._steps += is_taken
        longest = WINDOW_SHARE * self._steps.to(accumulator(self._steps.device))
        weight = torch.where(is_taken, 1 / longest.clamp(1, self._window), 0)
        weights: dict[Any, Tensor] = {}  # by device and dtype
        tensors = (chain(each.parameters(), each.buffers()) for each in (self.network, network))
        for averaged, current in zip(*tensors, strict=True):
            kind = averaged.device, averaged.dtype
            if averaged.is_floating_point():
                if kind not in weights:
                    weights[kind] = weight.to(*kind)
                averaged.lerp_(current, weights[kind])
            else:
                averaged.copy_(torch.where(is_taken.to(averaged.device), current, averaged))


TRAINING_WEIGHTS = "training_weights"
"""Entry of a checkpoint's ``optimizer_state``: the weights that train, and the number of steps.
``network_weights`` are the averaged ones, so that plain nnU-Net predicts with them."""


class _Wrapped(nn.Module):
    """Network in place of one that is wrapped for distributed training."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


class Average(Part):
    """Averaged weights, if the name has them.

    The network of the trainer trains, and no weight of it is ever exchanged. In validation, and while a
    checkpoint is saved, ``trainer.network`` is the one with the averaged weights.

    Attributes:
        weights: the averaged weights; None before the training starts, or if the name has none.
    """

    weights: AveragedWeights | None = None
    _view: Any = None  # network with the averaged weights, in the wrappers of the other
    _training: Any = None  # the network that trains, once the other one has had its place
    _is_wanted = False  # also before there are averaged weights

    def save_with(self, optimizer: Optimizer) -> None:
        """Save the weights that train with the state of an optimizer."""
        if self.trainer.training.ema is not None:
            optimizer.register_state_dict_post_hook(self._add_training_weights)

    def _add_training_weights(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self.weights is not None:
            weights = dict(unwrapped(self._network).state_dict())
            state_dict[TRAINING_WEIGHTS] = {"steps": self.weights.steps, "weights": weights}

    @property
    def _network(self) -> Any:
        """Network that trains, with its wrappers."""
        return self._training if self.is_bound else self.trainer.network

    def _begin(self) -> AveragedWeights:
        network = self._network
        self.weights = AveragedWeights(unwrapped(network), self.trainer.training.ema)
        self._view = self.weights.network
        if hasattr(network.module if self.trainer.is_ddp else network, "_orig_mod"):
            self._view = torch.compile(self._view)
        if self.trainer.is_ddp:
            self._view = _Wrapped(self._view)
        return self.weights

    def start(self) -> None:
        decay = self.trainer.training.ema
        if decay is None:
            return
        if self.weights is None:  # not continued, and pretrained weights are loaded by now
            self._begin()
        optimizer = self.trainer.optimizer
        if TRAINING_WEIGHTS not in optimizer.state_dict():
            raise Refusal(
                f"{self.name}: {type(optimizer).__name__} has a state_dict of its own, which does not "
                "run hooks",
                "leave _ema out",
            )
        self.log(f"Validating and saving averaged weights: {describe_average(decay)}")

    def update(self, is_taken: Tensor | None) -> None:
        """Average the weights after a step."""
        if self.weights is not None:
            self.weights.update(unwrapped(self._network), is_taken)

    # The network in validation and in checkpoints

    @property
    def is_bound(self) -> bool:
        """True if the trainer has the network with the averaged weights."""
        return self._view is not None and self.trainer.network is self._view

    def bind(self) -> None:
        """Give the trainer the network with the averaged weights, until :meth:`unbind`."""
        self._is_wanted = True
        if self._view is not None and not self.is_bound:
            self._training, self.trainer.network = self.trainer.network, self._view

    def unbind(self) -> None:
        """Give the trainer the network that trains."""
        self._is_wanted = False
        if self.is_bound:
            self.trainer.network = self._training

    @contextmanager
    def bound(self, stays: bool = False) -> Iterator[None]:
        """Give the trainer the network with the averaged weights in this context.

        Args:
            stays: True if it stays so until :meth:`unbind`, unless the context ends with an exception.
        """
        self.bind()
        try:
            yield
        except BaseException:
            self.unbind()
            raise
        if not stays:
            self.unbind()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the trainer the network that trains in this context, in which weights are loaded."""
        is_wanted = self._is_wanted
        self.unbind()
        yield
        if is_wanted:
            self.bind()

    # Continued trainings

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        has_averaged = TRAINING_WEIGHTS in checkpoint["optimizer_state"]
        if has_averaged != (self.trainer.training.ema is not None):
            yield f"{'with' if has_averaged else 'without'} averaged weights"

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        if self.trainer.training.ema is not None:  # the network has the averaged weights by now
            saved = checkpoint["optimizer_state"][TRAINING_WEIGHTS]
            self._begin().steps = saved["steps"]
            unwrapped(self._network).load_state_dict(saved["weights"])
