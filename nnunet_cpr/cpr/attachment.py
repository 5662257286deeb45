"""Attachment of a regularization method to an optimizer: checks, hooks, place in its state dict."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.cpr import saved_state
from nnunet_cpr.cpr.shards import is_checkpoint_imported, is_state_initialization
from nnunet_cpr.cpr.tensors import check_tensors, layouts
from nnunet_cpr.refusals import list_names

if TYPE_CHECKING:
    from nnunet_cpr.cpr.method import RegularizationMethod

_DECAYS = ("weight_decay", "lambd")
"""Settings of weight decay in parameter groups; ASGD has both."""
_HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code that torch puts around each ``step``, also those that a subclass calls, to run the hooks."""

attachments: weakref.WeakKeyDictionary[Optimizer, Attachment] = weakref.WeakKeyDictionary()
"""Attachments by optimizer. Copies of an optimizer, which torch makes without hooks, have none."""


def attached_method(optimizer: Optimizer) -> RegularizationMethod | None:
    """Return the method that is attached to an optimizer, None if there is none."""
    attachment = attachments.get(optimizer)
    return None if attachment is None else attachment.method


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


class Attachment:
    """Connection of a regularization method and the optimizer before whose steps it runs.

    Args:
        method, optimizer: as in ``RegularizationMethod.attach``, with its errors.

    Attributes:
        method: the method.
        order: names of its parameter matrices in the order of the optimizer's groups.
        has_open_correction: True from a correction to the end of the optimizer's step. If the step
            raises, for lack of memory for example, the correction stands for the step that is then
            repeated, and is not made twice.
    """

    method: RegularizationMethod

    def __init__(self, method: RegularizationMethod, optimizer: Optimizer) -> None:
        _check_kind(optimizer)
        if optimizer in attachments:
            title = attachments[optimizer].method.title
            raise RuntimeError(f"the optimizer has another {title} attached; call its detach()")
        self.method = method
        self._optimizer_ref = weakref.ref(optimizer)
        self._names = {id(p): name for name, p in zip(method.names, method.parameters)}
        # Some optimizers have a setting of their own by the name of one of the method's.
        self._setting_keys = [key for key in method.setting_keys if key not in optimizer.defaults]
        self.order = self._present_order(optimizer)
        self._check_groups(optimizer)
        method.check_settings(optimizer.param_groups, self._setting_keys)
        self._settings = self._present_settings(optimizer)
        self._watched = (*_DECAYS, *self._setting_keys)
        self._checked: Any = None  # groups that were checked last
        self._held: tuple[int, int] | None = (id(optimizer.param_groups), id(optimizer.state))
        self._layouts: dict[int, Any] = {}  # of the parameters at the step before
        self._loaded: dict[str, Tensor] = {}
        self.has_open_correction = False
        self._open_step: Iterator[None] | None = None
        attachments[optimizer] = self
        optimizer.__getstate__ = self._refuse_copy  # type: ignore[method-assign]
        self._hooks: list[Any] = [
            optimizer.register_state_dict_post_hook(self._add_to_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded_state_dict),
            optimizer.register_load_state_dict_post_hook(self._set_loaded_state),
        ]
        # torch.compile would treat values read on the host as constants, or recompile for each.
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._hooks.append(optimizer.register_step_post_hook(after))
        if not getattr(type(optimizer), "calls_attachment", False):  # its step calls this itself
            self._hooks.append(optimizer.register_step_pre_hook(before))

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, None if it is there no more."""
        return self._optimizer_ref()

    def remove(self) -> None:
        """Undo the attachment."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self.optimizer
        if optimizer is not None:
            del optimizer.__getstate__
            del attachments[optimizer]

    def _refuse_copy(self) -> NoReturn:
        # torch's __getstate__ drops hooks: a copy would silently train without regularization.
        raise TypeError(
            f"an optimizer with {self.method.title} attached cannot be copied or pickled; build a new "
            "one and load this one's state_dict() into it"
        )

    # Checks of the optimizer

    def _present_order(self, optimizer: Optimizer) -> list[str]:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return [self._names[id(p)] for p in params if id(p) in self._names]

    def _present_settings(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        keys = self._setting_keys
        return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Check parameters, their order and weight decay in the groups of the optimizer."""
        title, order = self.method.title, self._present_order(optimizer)
        if missing := [name for name in self.method.names if name not in set(order)]:
            raise ValueError(
                f"the optimizer does not have {list_names(missing)}, which {title} regularizes; "
                "give both the same parameters (libraries whose optimizers step copies of the "
                "parameters, as DeepSpeed's do, are not supported)"
            )
        for before, now in zip(self.order, order):
            if before != now:  # a state would be loaded in the order at construction
                raise ValueError(
                    f"parameter groups: expected the order at construction, got {now!r} in place of "
                    f"{before!r}; build a new optimizer to change their order"
                )
        for group in optimizer.param_groups:
            own = [self._names[id(p)] for p in group["params"] if id(p) in self._names]
            for key in _DECAYS:
                if own and _may_decay(group.get(key, 0)):
                    raise ValueError(
                        f"the optimizer applies weight decay to {list_names(own)}, which {title} "
                        f"regularizes; build it with {key}=0, and set it to 0 in its param_groups "
                        "after loading a state that has another"
                    )

    def _check_settings(self, optimizer: Optimizer) -> None:
        """Check that the method's settings in the groups are those at the attachment."""
        # Without settings in them, groups may come and go; _check_groups asks for their parameters.
        no_group: Any = "no group" if any(self._settings) else {}
        both = zip_longest(self._settings, self._present_settings(optimizer), fillvalue=no_group)
        for i, (before, own) in enumerate(both):
            if own != before:
                raise ValueError(
                    f"parameter group {i}: expected {before} as at construction, got "
                    f"{own or 'a new group'}; build a new optimizer to change groups or settings of "
                    f"{self.method.title}"
                )

    def _check_devices(self) -> None:
        for name, p in zip(self.method.names, self.method.parameters):
            if p.is_meta:
                raise RuntimeError(
                    f"parameter {name!r} is on the meta device, which has no values; allocate the "
                    "model's memory, for example with to_empty(), before building the optimizer"
                )

    def _check_not_replaced(self, optimizer: Optimizer) -> None:
        """Check that groups and state are those at the attachment or of a load that this took part in.

        Wrappers such as SAM's and those of averages load groups or state of the wrapped optimizer
        themselves, without its hooks. A state that is replaced by an empty one is a reset of momenta.
        """
        held = id(optimizer.param_groups), id(optimizer.state)
        if self._held is not None:
            has_other_state = held[1] != self._held[1] and bool(optimizer.state)
            if held[0] != self._held[0] or has_other_state:
                title = self.method.title
                raise RuntimeError(
                    f"the optimizer's groups or state were replaced after {title} had been "
                    "attached, as wrappers of optimizers do on load, but not the state of "
                    f"{title}; save its state_dict() beside the wrapper's, and load it after it"
                )
        self._held = held

    # Steps

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Check the optimizer before a step; return True if an update must precede the step.

        Raises:
            RuntimeError: its state was replaced, or a parameter has no values.
            ValueError: the optimizer lacks a regularized parameter, applies weight decay to one, or has
                another setting of the method.
        """
        if not self._names:
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
            self._check_groups(optimizer)
            self._check_settings(optimizer)
            self._check_devices()
            self._checked = groups
        return bool(optimizer.state) or not is_state_initialization(optimizer)

    def correct(self, optimizer: Optimizer) -> None:
        """Update and correct before the step of an optimizer, which :meth:`begin_step` has checked.

        Raises:
            RuntimeError: a gradient or state does not fit its parameter; nothing is changed then.
        """
        check_tensors(optimizer, self._layouts)
        self._layouts = layouts(optimizer)
        if not self.has_open_correction:
            self.method.move_state_to_parameters()
            found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler
            self._open_step = self.method.update_and_correct(found_inf)
            self.has_open_correction = True

    def _finish_step(self) -> None:
        """Finish what :meth:`correct` has begun, after the optimizer's update."""
        self.has_open_correction = False
        if self._open_step is not None:
            with torch.no_grad():
                next(self._open_step, None)
            self._open_step = None

    def forget_last_step(self) -> None:
        """Treat the next step as the first one, since another state was loaded."""
        self.has_open_correction, self._open_step, self._held = False, None, None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_within_step(optimizer) or not self.begin_step(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.correct(optimizer)
            return None

        # The correction must come after the closure, which computes the gradient at theta_t. Some
        # optimizers call it again at other points, and torch.compile would trace it.
        correct_once = functools.cache(torch.compiler.disable(self.correct))

        def closure_then_correct() -> Any:
            loss = closure()
            correct_once(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_correct, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_correct}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Torch runs no hook after a step that raises: its correction stays open.
        if self.has_open_correction and not is_within_step(optimizer):
            self._finish_step()

    # State dicts of the optimizer

    def _add_to_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        key, state = self.method.state_key, self.method.state_dict()
        state_dict[key] = state
        if is_checkpoint_imported():  # it keeps only the parameter groups and their state
            state_dict["param_groups"][0][key] = state

    def _check_loaded_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        key, title = self.method.state_key, self.method.title
        groups = state_dict["param_groups"]
        if not getattr(type(optimizer), "loads_by_name", False):
            groups = saved_state.order_by_names(optimizer.param_groups, groups)
        saved = [holder[key] for holder in (state_dict, *groups) if key in holder]
        if not saved:
            flattened = " or with flatten_optimizer_state_dict=True, for which torch drops its state"
            raise ValueError(
                f"state_dict: expected a state saved with {title}, got one saved without {title}"
                f"{flattened if is_checkpoint_imported() else ''}; to start {title} from it, load it "
                f"into an optimizer of torch and attach {title} afterwards"
            )
        saved_state.check_groups(optimizer, groups)
        self._loaded = self.method.validated(saved[0])
        has_names = all("param_names" in group for group in (*optimizer.param_groups, *groups))
        if state_dict["state"] and not has_names:
            saved_state.check_order(title, saved[0].get("order", saved[0]["names"]), self.order)
        # Settings are equal by now, perhaps in other words, and in groups that need not have any.
        own = [*self._settings, *[{}] * len(groups)]
        state_dict["param_groups"] = [
            {**{k: v for k, v in group.items() if k not in (key, *self._setting_keys)}, **settings}
            for group, settings in zip(groups, own)
        ]

    def _set_loaded_state(self, optimizer: Optimizer) -> None:
        # By now torch has accepted the rest of the state.
        self.method.set_state(self._loaded)
        self._loaded = {}


def _check_kind(optimizer: Optimizer) -> None:
    """Check that an optimizer runs hooks, and steps the parameters itself.

    Raises:
        TypeError: it does not.
    """
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


def _share_groups(inner: Optimizer, outer: Optimizer) -> bool:
    return any(group is own for group in inner.param_groups for own in outer.param_groups)


def _may_decay(weight_decay: Any) -> bool:
    if isinstance(weight_decay, Tensor) and weight_decay.device.type != "cpu":
        return True  # reading it would make the host wait in every step
    return bool(weight_decay)
