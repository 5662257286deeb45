"""Base class of regularization methods: parameter matrices, state between steps, and its state dict.

A method replaces the optimizer's weight decay. :class:`~nnunet_cpr.CPR` and the comparison methods
(:mod:`nnunet_cpr.baselines`) differ only in their update, which an
:class:`~nnunet_cpr.cpr.attachment.Attachment` calls before each step of an optimizer.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.cpr import saved_state
from nnunet_cpr.cpr.attachment import Attachment
from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.cpr.regularized_parameters import Params, find_doubtful, param_groups, regularized
from nnunet_cpr.cpr.tensors import to_device
from nnunet_cpr.refusals import counted, list_names


class RegularizationMethod(ABC):
    """Base class of regularization methods that run before each optimizer step.

    A subclass implements :meth:`update_and_correct` and returns its settings in :meth:`_config`. Its
    state consists of the tensors in ``_state``, which it changes in place.

    Attributes:
        has_decay: True if a step multiplies each matrix by one number, 1 minus its share in
            :meth:`decays`. Fused steps can apply it.
        title: name in error messages.
        state_key: key in the optimizer's ``state_dict()``.
        setting_keys: keys of parameter groups that are settings of the method.
        names: names of the J parameter matrices.
        parameters: the parameter matrices, in the order of ``names``.
    """

    title: ClassVar[str]
    state_key: ClassVar[str]
    has_decay: bool = False
    setting_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Params) -> None:
        groups = param_groups(params)
        chosen = regularized(groups)
        self.names = list(chosen)
        self.parameters = list(chosen.values())
        if not chosen:
            warnings.warn(
                f"params: no parameter to regularize for {self.title}; expected trainable parameters "
                "with two or more dimensions that are not embeddings, biases or normalization weights",
                stacklevel=3,
            )
        if doubtful := find_doubtful(groups):
            warnings.warn(
                f"params: {self.title} regularizes {list_names(doubtful)}, which may be embeddings or "
                "normalization weights, by their names or because all elements are 1; give the module, "
                "or put them into a group with regularize=False, or True to keep them",
                stacklevel=3,
            )
        # Weak, so that the optimizer and its state are freed without garbage collection.
        self._attachment_ref: weakref.ref[Attachment] | None = None
        self._order: list[str] = []  # names in the order of the optimizer's groups
        self._constants: dict[Any, tuple[Any, Tensor]] = {}
        step = torch.zeros((), dtype=torch.int64, device=self._device())
        self._state: dict[str, Tensor] = {"step": step}

    @property
    def step_count(self) -> int:
        """Number of steps so far, t."""
        return int(self._state["step"])

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self._config().items())
        return f"{self.title}({counted(len(self.names), 'matrix', 'matrices')}, {settings})"

    # Implemented by subclasses

    @abstractmethod
    def update_and_correct(self, found_inf: Tensor | None) -> Iterator[None] | None:
        """Correct the parameters from their values and gradients before the step.

        Args:
            found_inf: flag of ``GradScaler`` for fused optimizers, a scalar tensor; if it is not 0, the
                step is skipped and must not change anything.

        Returns:
            What is left to do after the optimizer's update, by ``next``; None for nothing.
        """

    def decays(self) -> Decays:
        """Count a step of a kernel on the CPU, and return what it has to subtract, if ``has_decay``."""
        raise NotImplementedError(f"{self.title} has no decay")

    def check_settings(self, groups: list[dict[str, Any]], keys: Sequence[str]) -> None:  # noqa: B027
        """Check that settings in the groups of an optimizer are those that this method was built with.

        Args:
            groups: parameter groups of the optimizer that it is being attached to; settings are replaced
                by plain values, as an optimizer saves them.
            keys: those of ``setting_keys`` that are not settings of the optimizer itself.

        Raises:
            ValueError: a setting is another one.
        """

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """Return the settings that a saved state belongs to, as plain values."""

    # For the update

    def _constant(self, name: Any, values: list[Any], dtype: torch.dtype) -> Tensor:
        """Return ``values`` as a vector on the device, cached; does not wait for a GPU."""
        device = self._state["step"].device
        known, vector = self._constants.get(name, (None, None))
        if vector is None or known != values or vector.device != device:
            vector = to_device(values, dtype, device)
            self._constants[name] = values, vector
        return vector

    def _device(self) -> torch.device:
        """Return the device of the parameters, or the CPU while they are on the meta device."""
        devices = [p.device for p in self.parameters[:1] if not p.is_meta]
        return devices[0] if devices else torch.device("cpu")

    def move_state_to_parameters(self) -> None:
        """Move the state to the device of the parameters."""
        device = self._device()
        if self._state["step"].device != device:
            self._state = {key: value.to(device) for key, value in self._state.items()}

    # Attachment to an optimizer

    @property
    def _attachment(self) -> Attachment | None:
        return None if self._attachment_ref is None else self._attachment_ref()

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer that this is attached to, None if there is none any more."""
        return None if self._attachment is None else self._attachment.optimizer

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Run before every step of ``optimizer``, and save and load the state with its state dict.

        Returns:
            The optimizer.

        Raises:
            RuntimeError: this method is attached already, or the optimizer has another one attached.
            TypeError: ``optimizer`` is not a torch optimizer, or wraps one.
            ValueError: the optimizer does not have a regularized parameter, or applies weight decay to
                one. Both are checked before every step, too.
        """
        if self.optimizer is not None:
            raise RuntimeError(f"{self.title} is attached to an optimizer already; call detach() first")
        attachment = Attachment(self, optimizer)
        self._attachment_ref, self._order = weakref.ref(attachment), attachment.order
        return optimizer

    def detach(self) -> None:
        """Stop regularizing; the state is kept."""
        if self._attachment is not None:
            self._attachment.remove()
        self._attachment_ref = None

    # State dict

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the names, shapes and configuration that it belongs to.

        It contains only tensors and plain values, which ``torch.load(..., weights_only=True)`` reads.
        They are copies, other than the momenta in an optimizer's ``state_dict()``, which are the tensors
        that the next steps change: to go back within a process, copy the optimizer's whole state dict
        with ``copy.deepcopy``.
        """
        return self._own_state_dict()

    def _own_state_dict(self) -> dict[str, Any]:
        """Return the state without warnings, to compare a loaded one with."""
        # The optimizer's order, by which torch matches momenta, where it is another than that of names.
        order = {} if self._order in ([], self.names) else {"order": list(self._order)}
        return {
            "version": saved_state.VERSION,
            "config": self._config(),
            "names": list(self.names),
            "shapes": [list(p.shape) for p in self.parameters],
            "state": {key: value.clone() for key, value in self._state.items()},
            **order,
        }

    def validated(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return copies of the tensors of a state from :meth:`state_dict`, in the order of ``names``.

        Raises:
            ValueError: names, shapes or configuration differ.
        """
        return saved_state.validated_tensors(self.title, state_dict, self._own_state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`. The parameters may be in another order.

        Raises:
            ValueError: names, shapes or configuration differ; nothing is changed then.
        """
        self.set_state(self.validated(state_dict))

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Set a state that :meth:`validated` has returned."""
        self._state = state
        if self._attachment is not None:
            self._attachment.forget_last_step()
