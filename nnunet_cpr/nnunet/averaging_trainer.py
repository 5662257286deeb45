"""nnU-Net's trainer that validates and saves averaged weights, where its name asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch.optim import Optimizer

from nnunet_cpr.cpr.attachment import is_within_step
from nnunet_cpr.names.value import TrainerName
from nnunet_cpr.nnunet.averaged_weights import AveragedWeights
from nnunet_cpr.nnunet.resuming_trainer import ResumingTrainer

TRAINING_WEIGHTS = "training_weights"
"""Entry of a checkpoint's ``optimizer_state``: the weights that train, and the number of steps.
``network_weights`` are the averaged ones, so that plain nnU-Net predicts with them."""


class AveragingTrainer(ResumingTrainer):
    """nnU-Net's trainer with averaged weights.

    The network has the weights that train from the start of an epoch's training to its end, and the
    averaged ones at all other times: in validation, in every checkpoint and for prediction.

    Attributes:
        settings: settings parsed from the class name.
    """

    settings: ClassVar[TrainerName]
    __averaged: AveragedWeights | None = None

    @property
    def averaged_weights(self) -> AveragedWeights | None:
        """Averaged weights; None before the training starts, or if the name has none."""
        return self.__averaged

    def average_after_steps(self, optimizer: Optimizer) -> None:
        """Average the weights after each step of an optimizer, and save those that train with it."""
        if self.settings.averaging_decay is not None:
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
        decay = self.settings.averaging_decay
        assert decay is not None
        self.__averaged = AveragedWeights(self.unwrapped_network, decay)
        return self.__averaged

    def on_train_start(self) -> None:
        super().on_train_start()
        decay = self.settings.averaging_decay
        if decay is None:
            return
        if self.__averaged is None:  # not continued, and pretrained weights are loaded by now
            self.__begin()
        if TRAINING_WEIGHTS not in self.optimizer.state_dict():
            self._exit(
                f"{type(self).__name__}: {type(self.optimizer).__name__} has a state_dict of its own, "
                "which does not run hooks; leave _ema out"
            )
        self.print_to_log_file(
            f"Validating and saving averaged weights: {self.averaging_description(decay)}"
        )

    @staticmethod
    def averaging_description(decay: float) -> str:
        """Return the average in words."""
        return (
            f"exponential moving average with decay {decay:g}, over about {1 / (1 - decay):,.0f} steps, "
            "but at most a tenth of the steps so far"
        )

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
        if self.settings.averaging_decay is not None:
            self.__begin().load_state_dict(checkpoint["optimizer_state"][TRAINING_WEIGHTS])

    def _differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        yield from super()._differences(checkpoint)
        has_averaged = TRAINING_WEIGHTS in checkpoint["optimizer_state"]
        if has_averaged != (self.settings.averaging_decay is not None):
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
