"""Optimizer of a training, what regularizes its parameters, and the steps that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from nnunetv2.training.lr_scheduler.polylr import PolyLRScheduler
from torch.optim import Optimizer

from nnunet_cpr.baselines import Baseline, DecoupledDecay
from nnunet_cpr.cpr.algorithm import CPR
from nnunet_cpr.cpr.attachment import attached_method, is_within_step
from nnunet_cpr.cpr.method import RegularizationMethod
from nnunet_cpr.nnunet import checkpoints
from nnunet_cpr.nnunet.parts.other_optimizer import without_weight_decay
from nnunet_cpr.nnunet.parts.part import Part
from nnunet_cpr.refusals import Refusal


class Regularization(Part):
    """Optimizer with CPR, a comparison method or weight decay, as the name says.

    A family either builds its optimizer or keeps that of the other trainer in its name or among its base
    classes, with that trainer's learning-rate schedule. Only here a hook counts optimizer steps.

    Attributes:
        configured: the optimizer that ``configure_optimizers`` of a family has returned, None before.
        given_decays: weight decays of the parameter groups with which it was built.
        baseline: comparison method attached to the optimizer, None if the name has none.
    """

    configured: Optimizer | None = None
    given_decays: frozenset[Any] = frozenset()
    baseline: Baseline | None = None
    _cpr: CPR | None = None
    _steps = 0
    _scale: float | None = None  # of GradScaler when the count began

    @property
    def cpr(self) -> CPR | None:
        """CPR of the optimizer, or the one to be attached to it; None if the family has none."""
        if self._cpr is None and self.trainer.settings.defaults.cpr:
            self._cpr = CPR(self.trainer.network, **self.trainer.cpr_settings)
        return self._cpr

    @property
    def _method(self) -> RegularizationMethod | None:
        return self.baseline if self.cpr is None else self.cpr

    def configure(self, configure_other: Callable[[], Any]) -> tuple[Optimizer, Any]:
        """Return the optimizer, with the regularization of the name attached, and its schedule.

        Args:
            configure_other: ``configure_optimizers`` of the other trainer.

        Raises:
            Refusal: they do not fit each other.
        """
        trainer = self.trainer
        self.parts.settings.resolve_again()
        settings, training = trainer.settings, trainer.training
        self.parts.weights.freeze()
        if self.baseline is None:
            self.baseline = training.build_baseline(trainer.network)
        if settings.defaults.keeps_optimizer:
            optimizer, schedule = self._configure_other(configure_other)
        else:
            optimizer = self._build()
            schedule = self.parts.schedule.build(optimizer, trainer.initial_lr)
        self._attach(optimizer)
        if optimizer is not self.configured:  # not a later stage with the same one
            optimizer.register_step_post_hook(self._count_step)
            self.parts.average.save_with(optimizer)
        self.configured = optimizer
        return optimizer, schedule

    def _build(self) -> Optimizer:
        """Return the optimizer of the family."""
        trainer, settings = self.trainer, self.trainer.settings
        if settings.defaults.cpr or self.baseline is not None:
            trainer.weight_decay = 0.0  # replaced by the regularization
        optimizer: Optimizer = trainer.build_optimizer()
        decays = {group.get("weight_decay", 0) for group in optimizer.param_groups}
        if isinstance(additional := attached_method(optimizer), DecoupledDecay):  # AMOS's
            decays.add(additional.weight_decay)
        self.given_decays = frozenset(decays)
        for group in optimizer.param_groups if settings.momentum is not None else []:
            group |= {"momentum": settings.momentum} if "momentum" in group else {}
        return optimizer

    def _configure_other(self, configure_other: Callable[[], Any]) -> tuple[Optimizer, Any]:
        """Call the other trainer's method, without weight decay of the regularized parameters."""
        method, other = self._method, self.parts.other.__name__
        with without_weight_decay([] if method is None else method.parameters) as given:
            configured = configure_other()
        self.parts.settings.resolve_again()  # it may set lengths, too
        optimizer, schedule = configured if isinstance(configured, tuple | list) else (configured, None)
        if not isinstance(optimizer, Optimizer) or schedule is None:
            raise Refusal(
                f"{self.name}: expected one optimizer and one schedule from {other}, got "
                f"{type(optimizer).__name__} and {type(schedule).__name__}; it cannot be combined"
            )
        settings = self.trainer.settings
        if settings.schedule is not None:
            if type(schedule) is not PolyLRScheduler:
                raise Refusal(
                    f"{self.name}: expected nnU-Net's own schedule of {other}, which "
                    f"_{settings.tokens()['schedule']} replaces, got {type(schedule).__name__}; "
                    "leave the suffix out"
                )
            schedule = self.parts.schedule.build(optimizer, schedule.initial_lr)
        if len(given) > 1 and any(group["is_split"] for group in given):
            self.warn(
                f"parameter groups of {other} are split for the regularization; a learning rate that it "
                "sets by the number of a group reaches another"
            )
        if given:  # not a later stage with the same optimizer
            self.given_decays = frozenset(group["weight_decay"] for group in given)
        return optimizer, schedule

    def _attach(self, optimizer: Optimizer) -> None:
        attached, settings = attached_method(optimizer), self.trainer.settings
        if settings.defaults.cpr and not settings.defaults.keeps_optimizer:
            if not isinstance(attached, CPR):
                raise Refusal(
                    f"{self.name}.build_optimizer: expected SGDCPR, AdamCPR or MuonCPR, got "
                    f"{type(optimizer).__name__} without CPR; derive the class from "
                    "nnUNetTrainerAttachCPR, which attaches CPR to any optimizer of configure_optimizers"
                )
            self._cpr = attached
            return
        cpr = self.cpr
        if cpr is not None and cpr.bound != self.trainer.training.kappa and attached is not cpr:
            self._cpr = None  # the base trainer has set its length as it built the optimizer
        method = self._method
        if method is not None and attached is not method:
            method.detach()  # from the optimizer of an earlier stage
            try:
                method.attach(optimizer)
            except ValueError as error:
                raise Refusal(f"{self.name}: {error}") from error

    def configure_anew(self) -> None:
        """Build the optimizer, its schedule and the regularization once more."""
        if self._cpr is not None:
            self._cpr.detach()
            self._cpr = None  # its bound is another one now
        self.trainer.optimizer, self.trainer.lr_scheduler = self.trainer.configure_optimizers()

    # Steps

    def _count_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Once, though torch also calls hooks in the steps of base classes.
        if not is_within_step(optimizer):
            self._steps += 1
            found_inf = getattr(optimizer, "found_inf", None)  # of GradScaler, for fused steps
            self.parts.average.update(None if found_inf is None else found_inf == 0)

    def start(self) -> None:
        if self.baseline is not None:
            self.log(f"Regularizing with {self.baseline!r}")

    def start_iteration(self, iteration: int) -> None:
        scaler = self.trainer.grad_scaler
        if self._scale is None and scaler is not None:
            self._scale = scaler.get_scale()

    def count_steps(self) -> int:
        """Return the number of steps in this process, an estimate where ``GradScaler`` skips some."""
        scaler = self.trainer.grad_scaler
        if scaler is None or self._scale is None or _skips_overflows(self.configured):
            return self._steps
        shrinking = math.log(max(self._scale / scaler.get_scale(), 1))
        return self._steps + round(shrinking / -math.log(scaler.get_backoff_factor()))

    # Continued trainings

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        yield from checkpoints.optimizer_differences(
            checkpoint["optimizer_state"],
            self.trainer.optimizer,
            not self.trainer.settings.defaults.keeps_optimizer,
        )


def _skips_overflows(optimizer: Any) -> bool:
    """Return True if ``GradScaler`` calls the step of an optimizer after an overflow, too."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
