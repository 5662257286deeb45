"""nnU-Net's trainer whose defaults follow the length with which the training began."""

from __future__ import annotations

from typing import Any

from nnunet_cpr.nnunet.averaged_weights import AveragingTrainer
from nnunet_cpr.nnunet.fold_files import DEFAULTS_LINE

DEFAULTS = "nnunet_cpr_defaults"
"""Entry of a checkpoint's ``init_args``: the number of steps that its defaults and shares follow, also
after it was extended. Version 0.2.0, whose defaults ignored the length, did not write it."""


class DefaultsTrainer(AveragingTrainer):
    """nnU-Net's trainer whose defaults follow the length with which the training began.

    Learning-rate warm-up and bound depend on the number of steps where a name does not give them. A
    training that is continued, perhaps as a longer one, keeps those that it began with.
    """

    __continued: dict[str, Any] | None = None
    __has_started = False

    def on_train_start(self) -> None:
        super().on_train_start()
        self.__has_started = True

    def _continue_as_begun(self, arguments: dict[str, Any]) -> None:
        super()._continue_as_begun(arguments)
        if self.__has_started:  # as it does
            return
        before = self.__followed()
        self.__continued = dict(arguments)
        if self.__followed() != before:
            self.configure_anew()
        self.record_defaults()

    def __followed(self) -> tuple[Any, ...]:
        """Return the settings that follow the length."""
        warmup = self._warmup_steps
        return warmup, self.settings.bound_for(self._length_of_defaults, warmup)

    def configure_anew(self) -> None:
        """Build the optimizer, its schedule and the regularization once more."""
        self.optimizer, self.lr_scheduler = self.configure_optimizers()

    @property
    def _total_steps(self) -> int:
        """Number of optimizer steps of the training."""
        return self.num_epochs * self.num_iterations_per_epoch

    @property
    def _warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        if self.settings.keeps_optimizer:  # the attribute of nnU-Net's trainers with warm-up, in epochs
            return getattr(self, "warmup_duration_whole_net", 0) * self.num_iterations_per_epoch
        return self.settings.warmup_for(self._length_of_defaults)

    @property
    def _length_of_defaults(self) -> int | None:
        """Number of steps that defaults and shares follow, those with which the training began.

        None for a training of version 0.2.0, whose defaults ignored the length.
        """
        return self._total_steps if self.__continued is None else self.__continued.get(DEFAULTS)

    def record_defaults(self) -> None:
        """Record the length in the checkpoints, once it is known."""
        if (length := self._length_of_defaults) is not None:
            self.my_init_kwargs[DEFAULTS] = length
        else:
            self.my_init_kwargs.pop(DEFAULTS, None)

    def describe_defaults(self) -> str:
        """Return the defaults that depend on the length in words, empty if the name has none."""
        settings = self.settings
        values = []
        if settings.warmup is None and settings.defaults.warmup:
            values.append(f"learning-rate warm-up of {self._warmup_steps:,} steps")
        if settings.kappa is None and settings.defaults.cpr:
            bound = settings.bound_for(self._length_of_defaults, self._warmup_steps)
            values.append(f"bounds after {bound.earliest:,} steps")
        length = self._length_of_defaults
        of = "of version 0.2.0" if length is None else f"for {length:,} steps"
        if length is not None and length != self._total_steps:
            of += ", with which the training began"
        return f"{DEFAULTS_LINE} {of}: {', '.join(values)}" if values else ""
