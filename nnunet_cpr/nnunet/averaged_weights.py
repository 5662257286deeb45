"""Averaged weights: their moving average, and nnU-Net's trainer that validates and saves them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer

from nnunet_cpr.cpr.attachment import is_within_step
from nnunet_cpr.cpr.regularizers import accumulator
from nnunet_cpr.names.training import describe_average
from nnunet_cpr.nnunet.resolved_trainer import ResolvedTrainer

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
        both = self._beside, self._network
        beside, ours = (chain(module.parameters(), module.buffers()) for module in both)
        return zip(beside, ours, strict=True)

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


TRAINING_WEIGHTS = "training_weights"
"""Entry of a checkpoint's ``optimizer_state``: the weights that train, and the number of steps.
``network_weights`` are the averaged ones, so that plain nnU-Net predicts with them."""


class AveragingTrainer(ResolvedTrainer):
    """nnU-Net's trainer with averaged weights.

    The network has the weights that train from the start of an epoch's training to its end, and the
    averaged ones at all other times: in validation, in every checkpoint and for prediction.
    """

    __averaged: AveragedWeights | None = None

    @property
    def averaged_weights(self) -> AveragedWeights | None:
        """Averaged weights; None before the training starts, or if the name has none."""
        return self.__averaged

    def average_after_steps(self, optimizer: Optimizer) -> None:
        """Average the weights after each step of an optimizer, and save those that train with it."""
        if self.training.ema is not None:
            optimizer.register_step_post_hook(self.__update)
            optimizer.register_state_dict_post_hook(self.__add_training_weights)

    def __update(self, optimizer: Optimizer, *_: Any) -> None:
        # Once, though torch also calls hooks in the steps of base classes.
        if self.__averaged is not None and not is_within_step(optimizer):
            found_inf = getattr(optimizer, "found_inf", None)  # of GradScaler, for fused steps
            self.__averaged.update(None if found_inf is None else found_inf == 0)

    def __add_training_weights(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self.__averaged is not None:
            state_dict[TRAINING_WEIGHTS] = self.__averaged.state_dict()

    def __begin(self) -> AveragedWeights:
        decay = self.training.ema
        assert decay is not None
        self.__averaged = AveragedWeights(self.unwrapped_network, decay)
        return self.__averaged

    def on_train_start(self) -> None:
        super().on_train_start()
        decay = self.training.ema
        if decay is None:
            return
        if self.__averaged is None:  # not continued, and pretrained weights are loaded by now
            self.__begin()
        if TRAINING_WEIGHTS not in self.optimizer.state_dict():
            self._exit(
                f"{type(self).__name__}: {type(self.optimizer).__name__} has a state_dict of its own, "
                "which does not run hooks; leave _ema out"
            )
        self.print_to_log_file(f"Validating and saving averaged weights: {describe_average(decay)}")

    def on_train_epoch_start(self) -> None:
        if self.__averaged is not None:
            self.__averaged.use_training()
        super().on_train_epoch_start()

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        super().on_train_epoch_end(train_outputs)
        if self.__averaged is not None:
            self.__averaged.use_averaged()

    def on_epoch_end(self) -> None:
        with nullcontext() if self.__averaged is None else _titled("validated: averaged weights"):
            super().on_epoch_end()

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        super()._restore(checkpoint)
        if self.training.ema is not None:
            self.__begin().load_state_dict(checkpoint["optimizer_state"][TRAINING_WEIGHTS])

    def _differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        yield from super()._differences(checkpoint)
        has_averaged = TRAINING_WEIGHTS in checkpoint["optimizer_state"]
        if has_averaged != (self.training.ema is not None):
            yield f"{'with' if has_averaged else 'without'} averaged weights"


@contextmanager
def _titled(title: str) -> Iterator[None]:
    """Write a title into figures that are saved in this context, such as nnU-Net's ``progress.png``."""
    save = Figure.savefig

    def save_titled(figure: Figure, *arguments: Any, **options: Any) -> None:
        if figure.axes:
            figure.axes[0].set_title(title, loc="right")
        save(figure, *arguments, **options)

    Figure.savefig = save_titled  # type: ignore
    try:
        yield
    finally:
        Figure.savefig = save  # type: ignore
