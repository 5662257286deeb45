"""Base class of regularization methods that run before each step of a torch optimizer.

Such a method replaces the optimizer's weight decay, and its state is saved in the optimizer's state
dict. :class:`~nnunet_cpr.CPR` and the comparison methods (:mod:`nnunet_cpr.baselines`) differ only
in their update.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.cpr import saved_state
from nnunet_cpr.cpr.multipliers import Decays
from nnunet_cpr.cpr.regularized_parameters import Params, find_doubtful, param_groups, regularized
from nnunet_cpr.cpr.shards import is_checkpoint_imported, is_state_initialization
from nnunet_cpr.cpr.tensors import check_tensors, layouts, to_device
from nnunet_cpr.refusals import list_names

_DECAYS = ("weight_decay", "lambd")
"""Settings of weight decay in parameter groups; ASGD has both."""
_HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code that torch puts around each ``step``, also those that a subclass calls, to run the hooks."""


class RegularizationMethod(ABC):
    """Base class of regularization methods that run before each optimizer step.

    A subclass implements :meth:`update_and_correct` and returns its settings in :meth:`_config`. Its
    state consists of the tensors in ``_state``.

    Attributes:
        has_decay: True if a step multiplies each matrix by one number, 1 minus its decay, which
            :meth:`update_decay` returns. Fused steps can apply it.
        title: name in error messages.
        state_key: key in the optimizer's ``state_dict()``.
        names: names of the J parameter matrices.
        parameters: the parameter matrices, in the order of ``names``.
        has_open_correction: True from a correction to the end of the optimizer's step.
    """

    title: ClassVar[str]
    state_key: ClassVar[str]
    has_decay: bool = False
    _watched: ClassVar[tuple[str, ...]] = _DECAYS
    """Settings of parameter groups that are checked when they change."""

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
        # A weak reference, so that the optimizer and its state are freed without garbage collection.
        self._optimizer_ref: weakref.ref[Optimizer] | None = None
        self._hooks: list[Any] = []
        self._order: list[str] = []  # names in the order of the optimizer's groups
        # To notice changes of the optimizer's groups, and of the dtypes of its parameters:
        self._checked: Any = None
        self._layouts: dict[int, Any] = {}
        self._pending_state: dict[str, Tensor] | None = None
        self.has_open_correction = False
        self._held: tuple[int, int] | None = None  # the optimizer's groups and state, None for any
        self._constants: dict[Any, tuple[Any, Tensor]] = {}
        step = torch.zeros((), dtype=torch.int64, device=self._device())
        self._state: dict[str, Tensor] = {"step": step}

    @property
    def _optimizer(self) -> Optimizer | None:
        """Optimizer that this is attached to, None if there is none any more."""
        return None if self._optimizer_ref is None else self._optimizer_ref()

    @property
    def step_count(self) -> int:
        """Number of steps so far, t."""
        return int(self._state["step"])

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self._config().items())
        return f"{self.title}({len(self.names)} matrices, {settings})"

    # Implemented by subclasses

    @abstractmethod
    def update_and_correct(self, found_inf: Tensor | None) -> None:
        """Correct the parameters from their values and gradients before the step.

        Args:
            found_inf: flag of ``GradScaler`` for fused optimizers, a scalar tensor; if it is not 0, the
                step is skipped and must not change anything.
        """

    def update_decay(
        self, sums_of_squares: Callable[[], Tensor], found_inf: Tensor | None = None
    ) -> Tensor:
        """Update the state for a step without waiting for a GPU, if ``has_decay``.

        Args:
            sums_of_squares: returns the sum of squares of each matrix, ``[J]``, of the local elements of
                DTensors.
            found_inf: as in :meth:`update_and_correct`.

        Returns:
            Share of each matrix to subtract in this step, float32 ``[J]``; negative to add it. Matrices
            without a gradient are not changed, whatever their share.
        """
        raise NotImplementedError(f"{self.title} has no decay")

    def begin_kernel_step(self) -> Decays | None:
        """Count a step on the CPU, of which a kernel updates the multipliers.

        Returns:
            What the kernel needs; None if R is needed before the kernel (a bound may be set in this
            step, bounds are adaptive, or matrices are sharded), or if the method has no multipliers.
            Then nothing is counted, and the step needs :meth:`update_decay`.
        """
        return None

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

    def _move_state_to_parameters(self) -> None:
        """Move the state to the device of the parameters."""
        device = self._device()
        if self._state["step"].device != device:
            self._state = {key: value.to(device) for key, value in self._state.items()}

    # Attachment to an optimizer

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
        if self._optimizer is not None:
            raise RuntimeError(f"{self.title} is attached to an optimizer already; call detach() first")
        if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer that runs hooks, got a "
                f"{type(optimizer).__name__}; if it wraps an optimizer, attach to the wrapped one"
            )
        for name, value in vars(optimizer).items():
            # SAM shares its groups with its base. ZeroRedundancyOptimizer, which is supported, does not.
            if isinstance(value, Optimizer) and _share_groups(value, optimizer):
                raise TypeError(
                    f"optimizer: expected one that steps the parameters itself, got a "
                    f"{type(optimizer).__name__} around a {type(value).__name__}; attach to its {name}"
                )
        other = attached_method(optimizer)
        if other is not None:
            raise RuntimeError(f"the optimizer has another {other.title} attached; call its detach()")
        self._check_optimizer(optimizer)
        self._optimizer_ref = weakref.ref(optimizer)
        self._held = id(optimizer.param_groups), id(optimizer.state)
        _attached[optimizer] = self
        optimizer.__getstate__ = self._refuse_copy  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded_state_dict),
            optimizer.register_load_state_dict_post_hook(self._set_loaded_state),
            *self._step_hooks(optimizer),
        ]
        return optimizer

    def _step_hooks(self, optimizer: Optimizer) -> list[Any]:
        # torch.compile would treat values read on the host as constants, or recompile for each.
        after = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        if getattr(type(optimizer), "calls_method", False):  # it calls this method itself
            return [after]
        return [optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)), after]

    def detach(self) -> None:
        """Stop regularizing; the state is kept."""
        self.has_open_correction = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        optimizer = self._optimizer
        if optimizer is not None:
            del optimizer.__getstate__
            del _attached[optimizer]
        self._optimizer_ref = None

    def _refuse_copy(self) -> NoReturn:
        # torch's __getstate__ drops hooks: a copy would silently train without regularization.
        raise TypeError(
            f"an optimizer with {self.title} attached cannot be copied or pickled; build a new one and "
            "load this one's state_dict() into it"
        )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        names = {id(p): name for name, p in zip(self.names, self.parameters)}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for key, name in names.items() if key not in held]
        if missing:
            raise ValueError(
                f"the optimizer does not have {list_names(missing)}, which {self.title} regularizes; "
                "give both the same parameters (libraries whose optimizers step copies of the "
                "parameters, as DeepSpeed's do, are not supported)"
            )
        order = [names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names]
        if self._optimizer is None:  # being attached
            self._order = order
        for before, now in zip(self._order, order):
            if before != now:  # a state would be loaded in the order at construction
                raise ValueError(
                    f"parameter groups: expected the order at construction, got {now!r} in place of "
                    f"{before!r}; build a new optimizer to change their order"
                )
        for group, key in product(optimizer.param_groups, _DECAYS):
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            if own and _may_decay(group.get(key, 0)):
                raise ValueError(
                    f"the optimizer applies weight decay to {list_names(own)}, which {self.title} "
                    f"regularizes; build it with {key}=0, and set it to 0 in its param_groups after "
                    "loading a state that has another"
                )

    def _check_devices(self) -> None:
        for name, p in zip(self.names, self.parameters):
            if p.is_meta:
                raise RuntimeError(
                    f"parameter {name!r} is on the meta device, which has no values; allocate the "
                    "model's memory, for example with to_empty(), before building the optimizer"
                )

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Check the optimizer before a step; return True if an update must precede the step.

        Raises:
            ValueError: the optimizer lacks a regularized parameter, or applies weight decay to one.
        """
        if not self.parameters:
            return False
        if self._held != (id(optimizer.param_groups), id(optimizer.state)):
            self._check_not_replaced(optimizer)
        # A library may have replaced parameters; a scheduler or a loaded state, the weight decay.
        groups = [
            (
                list(map(id, group["params"])),
                # Tensors on the CPU may be changed in place.
                [
                    value.tolist() if type(value) is Tensor and value.device.type == "cpu" else value
                    for value in map(group.get, self._watched)
                ],
            )
            for group in optimizer.param_groups
        ]
        if groups != self._checked:
            self._check_optimizer(optimizer)
            self._check_devices()
            self._checked = groups
        return bool(optimizer.state) or not is_state_initialization(optimizer)

    def _check_not_replaced(self, optimizer: Optimizer) -> None:
        """Check that groups and state are those at the attachment or of a load that this took part in.

        Wrappers such as SAM's and those of averages load groups or state of the wrapped optimizer
        themselves, without its hooks. A state that is replaced by an empty one is a reset of momenta.
        """
        held = id(optimizer.param_groups), id(optimizer.state)
        if self._held is not None:
            has_other_state = held[1] != self._held[1] and bool(optimizer.state)
            if held[0] != self._held[0] or has_other_state:
                raise RuntimeError(
                    f"the optimizer's groups or state were replaced after {self.title} had been "
                    "attached, as wrappers of optimizers do on load, but not the state of "
                    f"{self.title}; save its state_dict() beside the wrapper's, and load it after it"
                )
        self._held = held

    def correct_before_step(self, optimizer: Optimizer) -> None:
        """Update and correct before the step of an optimizer, which :meth:`begin_step` has checked.

        If the optimizer raises after it, for lack of memory for example, the correction stands for the
        step that is then repeated, and is not made twice.

        Raises:
            RuntimeError: a gradient or state does not fit its parameter; nothing is changed then.
        """
        check_tensors(optimizer, self._layouts)
        self._layouts = layouts(optimizer)
        if not self.has_open_correction:
            self._move_state_to_parameters()
            self.update_and_correct(getattr(optimizer, "found_inf", None))  # set by GradScaler
            self.has_open_correction = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.has_open_correction:  # torch runs no hook after a step that raises
            self.has_open_correction = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_within_step(optimizer) or not self.begin_step(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.correct_before_step(optimizer)
            return None

        # The correction must come after the closure, which computes the gradient at theta_t. Some
        # optimizers call it again at other points, and torch.compile would trace it.
        correct_once = functools.cache(torch.compiler.disable(self.correct_before_step))

        def closure_then_correct() -> Any:
            loss = closure()
            correct_once(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_correct, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_correct}

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the names, shapes and configuration that it belongs to.

        It contains only tensors and plain values, which ``torch.load(..., weights_only=True)`` reads.
        """
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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`. The parameters may be in another order.

        Raises:
            ValueError: names, shapes or configuration differ; nothing is changed then.
        """
        self._state = saved_state.validated_tensors(self.title, state_dict, self.state_dict())
        self.has_open_correction, self._held = False, None

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state = state_dict[self.state_key] = self.state_dict()
        if is_checkpoint_imported():  # it keeps only the parameter groups and their state
            state_dict["param_groups"][0][self.state_key] = state

    def _check_loaded_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        groups = saved_state.order_by_names(optimizer.param_groups, state_dict["param_groups"])
        saved = [holder[self.state_key] for holder in (state_dict, *groups) if self.state_key in holder]
        if not saved:
            raise ValueError(
                f"state_dict: expected a state saved with {self.title}, got one saved without "
                f"{self.title}; to start {self.title} from it, load it into an optimizer of torch and "
                f"attach {self.title} afterwards"
            )
        saved_state.check_settings(optimizer, groups)
        pending = saved_state.validated_tensors(self.title, saved[0], self.state_dict())
        has_names = all("param_names" in group for group in (*optimizer.param_groups, *groups))
        if state_dict["state"] and not has_names:
            saved_state.check_order(self.title, saved[0].get("order", saved[0]["names"]), self._order)
        self._pending_state = pending
        state_dict["param_groups"] = [
            {key: value for key, value in group.items() if key != self.state_key} for group in groups
        ]

    def _set_loaded_state(self, optimizer: Optimizer) -> None:
        # By now torch has accepted the rest of the state.
        assert self._pending_state is not None
        self._state, self._pending_state = self._pending_state, None
        self.has_open_correction, self._held = False, None


_attached: weakref.WeakKeyDictionary[Optimizer, RegularizationMethod] = weakref.WeakKeyDictionary()


def attached_method(optimizer: Optimizer) -> RegularizationMethod | None:
    """Return the method that is attached to an optimizer, None if there is none.

    Copies of an optimizer, which torch makes without hooks, have none.
    """
    return _attached.get(optimizer)


def _share_groups(inner: Optimizer, outer: Optimizer) -> bool:
    return any(group is own for group in inner.param_groups for own in outer.param_groups)


def is_within_step(optimizer: Optimizer) -> bool:
    """Return True if a hook of a step runs within another step of the same optimizer.

    Torch runs the hooks in the ``step`` of each class that has been used. A subclass whose ``step``
    calls ``super().step()`` thus runs them twice. Only the stack tells: a counter would be wrong after a
    step that raises, for which torch runs no hook.
    """
    frame, depth = sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1


def _may_decay(weight_decay: Any) -> bool:
    if isinstance(weight_decay, Tensor) and weight_decay.device.type != "cpu":
        return True  # reading it would make the host wait in every step
    return bool(weight_decay)
