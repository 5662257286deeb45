"""SGD and Adam with CPR in place of weight decay."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from nnunet_cpr._distributed import is_placed_alike, is_sharded, local_parts, refuse_zero_redundancy
from nnunet_cpr._row_norms import is_dense
from nnunet_cpr._state_dict import short
from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr import CPR, Settings
from nnunet_cpr.fused import GroupStep, OnePass, Rule, fused_steps_are_on, one_pass_for
from nnunet_cpr.fused._memory import Memory, is_cut_short, laid_out_like
from nnunet_cpr.fused._self_check import passes_self_check
from nnunet_cpr.param_groups import Params, param_groups
from nnunet_cpr.regularizers import REGULARIZERS, Regularizer


class CPROptimizer(torch.optim.Optimizer, ABC):
    """Base class of the two optimizers, which build a CPR of their own.

    A step goes one of two ways. The unfused one is CPR's correction and then torch's step. The fused one
    takes both in one pass over the memory (:mod:`nnunet_cpr.fused`); for that a subclass says what its
    step reads and writes, and by which rule.
    """

    cpr: CPR
    _torch_class: type[torch.optim.Optimizer]
    _choose_one_pass = staticmethod(one_pass_for)
    _step_uncompiled: Callable[..., Any] | None = None

    def _attach(self, cpr: CPR, settings: list[dict[str, Any]], fused: bool | None) -> None:
        refuse_zero_redundancy(type(self).__name__, f"torch.optim.{self._torch_class.__name__}")
        self.cpr = cpr
        self._settings = settings
        # With it GradScaler leaves unscaling to the step, and libraries refuse to clip gradients. As in
        # torch, only who asks for fused=True gets that.
        self._step_supports_amp_scaling = bool(fused)
        cpr.attach(self)
        self.register_load_state_dict_post_hook(_own_loaded_state)  # type: ignore[arg-type]
        if CPROptimizer._step_uncompiled is None:  # not at import: it takes torch a second
            CPROptimizer._step_uncompiled = staticmethod(
                torch.compiler.disable(CPROptimizer._step_eagerly)
            )
        self._fused_is_on = fused_steps_are_on() and fused is not False
        self._groups_are = self._group_marks()
        self._columns: dict[int, list[Memory]] = {}  # of each group, as the last step found them
        self._matrix = {id(p): j for j, p in enumerate(cpr.parameters)}
        self._has_shards = any(is_sharded(p) for g in self.param_groups for p in g["params"])
        self._choose_backend()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; CPR's update comes before it, and after the closure.

        ``torch.compile`` leaves it as it is.

        Returns:
            What the closure returned.
        """
        assert CPROptimizer._step_uncompiled is not None
        return CPROptimizer._step_uncompiled(self, closure)

    @torch.no_grad()
    def _step_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Here and not in a hook: what hooks do to gradients and parameters comes before.
        regularizes = self.cpr.begin_step(self)
        self._check_settings()
        self._follow_parameters()
        groups = [self._look_at(*item) for item in enumerate(self.param_groups)]
        scaler = {
            key: value
            for key in ("grad_scale", "found_inf")  # set by GradScaler for fused optimizers
            if (value := getattr(self, key, None)) is not None
        }
        if regularizes and (backend := self._backend_for(groups)) is not None:
            measure = self.cpr.l2_from(backend.sums_of_squares())
            multiplier = self.cpr.update(measure, scaler.get("found_inf"))
            self._count_steps(groups)
            backend.step(groups, multiplier, **scaler)  # type: ignore[arg-type]
            if "found_inf" in scaler:
                self._count_steps(groups, scaler["found_inf"])
            return loss
        fits = [
            group is not None and group.has_one_dtype() and self._torch_fuses(settings)
            for group, settings in zip(groups, self.param_groups)
        ]
        for settings, fit in zip(self.param_groups, fits):
            if not fit:
                self._refuse_unfit(settings["params"])
        if self._one_pass is not None:
            self._one_pass.forget_measure()
        if regularizes:
            self.cpr.step(scaler.get("found_inf"))
        self._torch_step(fits, scaler)
        return loss

    # The fused step

    def _choose_backend(self) -> None:
        """Choose the backend of the fused step for the parameters as they are now."""
        held = [p for group in self.param_groups for p in group["params"]]
        self._local = dict(zip(map(id, held), local_parts(held))) if self._has_shards else {}
        self._chosen_for = self._places()
        matrices = [self._local.get(id(p), p) for p in self.cpr.parameters]
        # Should a frozen parameter get a gradient later, the backend looks at it then.
        params = [self._local.get(id(p), p) for p in held if p.requires_grad]
        is_l2 = all(settings.regularizer is REGULARIZERS["l2"] for settings in self.cpr.settings)
        self._one_pass = (
            self._choose_one_pass(matrices, params) if is_l2 and params and self._fused_is_on else None
        )

    def _places(self) -> list[Any]:
        """Return what a backend is made for; of DTensors the local parts may have been replaced."""
        if not self._has_shards:
            return [(p.numel(), p.dtype, p.device) for p in self.cpr.parameters]
        held = local_parts(p for group in self.param_groups for p in group["params"])
        return [(p.numel(), p.dtype, p.device, p.data_ptr()) for p in held]

    def _follow_parameters(self) -> None:
        """Choose the backend anew if the parameters are no longer those it was chosen for."""
        backend = self._one_pass
        is_as_before = backend is not None and not self._has_shards and not backend.is_outdated()
        if not is_as_before and self._chosen_for != self._places():
            self._choose_backend()

    def _backend_for(self, groups: Sequence[GroupStep | None]) -> OnePass | None:
        """Return the backend if it can take this step, with what it needs in the groups."""
        backend = self._one_pass
        if backend is None:
            return None
        for group, settings in zip(groups, self.param_groups):
            # Weight decay can only be on what CPR leaves alone.
            if group is None or settings["weight_decay"] != 0:
                return None
        known = [group for group in groups if group is not None]
        return backend if backend.covers(known) and passes_self_check(backend, known) else None

    def _look_at(self, place: int, group: dict[str, Any]) -> GroupStep | None:
        """Return the group's tensors for a fused step, ours or torch's; None if it has to be unfused."""
        # For DTensors of SGD fused is not set, since torch has no such step.
        is_set = group["fused"] or (self._has_shards and not self._torch_fuses_shards)
        if not (self._fused_is_on and is_set and self._allows_fused(group)):
            return None
        stepped = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in stepped]
        if [g.layout for g in grads] != [torch.strided] * len(grads):
            return None
        if [g.dtype for g in grads] != [p.dtype for p in stepped]:
            return None
        # A gradient may be a sum over processes that is still to be taken, as torch's unfused step does.
        if self._has_shards and not all(map(is_placed_alike, stepped, grads)):
            return None
        tensors = self._tensors(group, stepped, grads)
        if tensors is None:
            return None
        if not tensors.look(self._columns.get(place, ())):
            _lay_out(self, stepped)
            tensors = self._tensors(group, stepped, [p.grad for p in stepped])
            if tensors is None or not tensors.look():
                return None
        self._columns[place] = tensors.columns
        return tensors

    def _tensors(
        self, group: dict[str, Any], stepped: list[Tensor], grads: list[Any]
    ) -> GroupStep | None:
        params = stepped
        state, steps = self._state_of(group, stepped)
        if self._has_shards:
            if not all(all(map(is_placed_alike, stepped, column)) for column in state if column):
                return None
            params = [self._local[id(p)] for p in stepped]
            grads = local_parts(grads)
            state = [local_parts(column) for column in state]
            steps = local_parts(steps)
        matrices = [self._matrix.get(id(p), -1) for p in stepped]
        return GroupStep(self._rule(group), params, grads, state, steps, matrices)

    def _refuse_unfit(self, params: list[Tensor]) -> None:
        """Raise for tensors that torch's step could not use either, before anything is changed.

        Raises:
            RuntimeError: memory has been cut short, or a gradient or state is on another device, or has
                another shape or dtype.
        """
        for p in params:
            state = self.state.get(p, {})
            beside = {f"state {key!r}": state.get(key) for key in (*self._state_keys, "step")}
            tensors = {"parameter": p, "gradient": p.grad, **beside}
            own = {key: t for key, t in tensors.items() if isinstance(t, Tensor)}
            for key, t in own.items():
                if is_cut_short(t):
                    raise RuntimeError(
                        f"the memory of the {key} of shape {tuple(t.shape)} has been freed or "
                        "shortened; give it storage for all its elements before stepping"
                    )
                if p.grad is None or key in ("parameter", "state 'step'"):
                    continue
                problem = f"the {key} of a parameter of shape {tuple(p.shape)}"
                if t.device != p.device:
                    raise RuntimeError(
                        f"{problem} is on {t.device} and the parameter is on {p.device}; load the "
                        "optimizer's state_dict() again after moving the model"
                    )
                if t.shape != p.shape:
                    raise RuntimeError(
                        f"{problem} has shape {tuple(t.shape)}; build a new optimizer after changing "
                        "the shapes of parameters"
                    )
                if t.dtype != p.dtype and not self._takes_other_dtypes:
                    raise RuntimeError(
                        f"{problem} is {t.dtype} and the parameter is {p.dtype}; load the optimizer's "
                        "state_dict() again after casting the model"
                    )

    # torch's step

    def _torch_step(self, fits: list[bool], scaler: dict[str, Tensor]) -> None:
        """Take torch's own step; unfused for groups that do not fit into a fused one."""
        unfit = [g for g, fit in zip(self.param_groups, fits) if g["fused"] and not fit]
        if unfit and scaler:
            # Only fused steps take GradScaler's two numbers.
            if "found_inf" in scaler and bool(scaler["found_inf"]):
                return
            scale = scaler.get("grad_scale")
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            for grad in grads if scale is not None else []:
                grad.div_(scale.to(grad.device))  # type: ignore[union-attr]
            self.grad_scale = self.found_inf = None  # GradScaler deletes them after the step
        for group in unfit:
            group["fused"] = False
        try:
            _without_hooks(self._torch_class.step)(self)
        finally:
            for group in unfit:
                group["fused"] = True

    def _torch_fuses(self, group: dict[str, Any]) -> bool:
        """Return True if torch has a fused step for the group's kinds of tensors."""
        sharded = {is_sharded(p) for p in group["params"]} if self._has_shards else {False}
        return sharded == {False} or (sharded == {True} and self._torch_fuses_shards)

    # What a subclass says of its step

    _torch_fuses_shards = False
    """True if torch's fused step takes DTensors."""

    _state_keys: tuple[str, ...]
    """Keys of the state that has the parameters' shapes."""
    _takes_other_dtypes = False
    """True if torch's unfused step takes gradients and state whose dtype is not the parameter's."""

    @abstractmethod
    def _allows_fused(self, group: dict[str, Any]) -> bool:
        """Return True if a fused step knows all settings of the group."""

    @abstractmethod
    def _state_of(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return the state of the parameters and their counts of steps; what is missing is made."""

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """Return the settings of the step."""

    def _count_steps(self, groups: Sequence[GroupStep | None], found_inf: Tensor | None = None) -> None:
        """Add 1 to the counts of steps; with ``found_inf`` take it back where that is 1."""
        steps = [count for group in groups if group is not None for count in group.steps]
        if steps and found_inf is None:
            torch._foreach_add_(steps, 1)
        elif steps:
            assert found_inf is not None
            torch._foreach_sub_(steps, [found_inf.to(steps[0].device)] * len(steps))

    # Settings and state

    def _check_settings(self) -> None:
        """Raise if settings of CPR in a parameter group have been changed, which would do nothing.

        Raises:
            ValueError: they have, or groups were added, removed or reordered.
        """
        if self._groups_are != self._group_marks():
            raise ValueError(
                f"parameter groups of {type(self).__name__} were added, removed or reordered; build a "
                "new optimizer"
            )
        for i, (group, own) in enumerate(zip(self.param_groups, self._settings)):
            for key in Settings.KEYS:
                now = group.get(key)
                if isinstance(now, Tensor) or now != own[key]:
                    raise ValueError(
                        f"{key} of parameter group {i} was {own[key]!r} and is now {short(now)}; "
                        "CPR's settings cannot be changed later, build a new optimizer"
                    )

    def _group_marks(self) -> list[tuple[int, ...]]:
        """Return the number of parameters and the first one of each group."""
        return [(len(g["params"]), *map(id, g["params"][:1])) for g in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; later it is refused.

        Raises:
            RuntimeError: CPR has been set up for the parameters there were.
        """
        if hasattr(self, "cpr"):
            raise RuntimeError(
                f"{type(self).__name__} takes no parameters later, since its bounds and multipliers "
                "belong to those it was built with; build it with all parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        # torch's own __getstate__ drops hooks: a copy would go on silently without CPR.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; build a new one and load this "
            "one's state_dict() into it"
        )


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a torch optimizer's step without torch's wrapper, which would run the hooks again."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _lay_out(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Put gradients and state into the memory order of their parameters, which fused steps rely on."""
    for p in params:
        if p.grad is not None and p.grad.layout is torch.strided:
            grad = laid_out_like(p, p.grad)
            if grad is not p.grad:
                p.grad = grad
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            if 0 not in value.stride():  # torch refuses expanded state
                optimizer.state[p][key] = laid_out_like(p, value)


def _own_loaded_state(optimizer: CPROptimizer) -> None:
    """Give the optimizer a state and settings of its own after loading.

    torch keeps the very tensors and groups of the dict that was loaded: the next steps would change
    them, and a checkpoint that is read with ``mmap`` could not be written over. CPR's settings stay as
    they are: a state that was saved with others has been refused.
    """
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():  # or a value of users
            if isinstance(value, Tensor):
                state[key] = value.clone()
    for group, settings in zip(optimizer.param_groups, optimizer._settings):
        group.update(settings)
        _lay_out(optimizer, group["params"] if group["fused"] else [])


_TORCH_KEYS = {"maximize", "foreach", "differentiable", "fused"}
_BOOKKEEPING = {
    "name",  # Lightning's monitor of learning rates
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"),  # schedulers
    *("lr_scale", "group_name", "layer_id", "layer_name"),  # timm and layer-wise learning rates
}
"""Keys of parameter groups that others read; any other that an optimizer does not know is a mistake."""


def _built(
    params: Params, kappa: Any, regularizer: Any, mu: Any, adaptive: Any, known: set[str]
) -> tuple[CPR, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return CPR, the groups for torch, and the settings of each group as plain values.

    The groups have the weight decay that CPR replaces at 0. A module makes one group in its own order,
    as ``torch.optim.SGD(module.parameters())`` does, so that either loads the other's state.

    Raises:
        TypeError: a group has a key that nothing reads.
    """
    groups = param_groups(params)
    known = known | {"params", "weight_decay", "regularize", *Settings.KEYS}
    for i, group in enumerate(groups):
        unknown = sorted(map(str, group.keys() - known - _BOOKKEEPING))
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            advice = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"parameter group {i} has an unexpected key {unknown[0]!r}{advice}")
    cpr = CPR(groups, kappa=kappa, regularizer=regularizer, mu=mu, adaptive=adaptive)
    given = {"kappa": kappa, "regularizer": regularizer, "mu": mu, "adaptive": adaptive}
    settings = [Settings.of({**given, **group}).plain() for group in groups]
    if isinstance(params, torch.nn.Module):
        names = {id(p): name for group in groups for name, p in group["params"]}
        in_order = [(names[id(p)], p) for p in params.parameters()]
        return cpr, [{"params": in_order, "weight_decay": 0, **settings[0]}], settings[:1]
    for_torch = [
        {
            **{key: value for key, value in group.items() if key != "regularize"},
            **own,
            "params": group["params"] if groups.has_names else [p for _, p in group["params"]],
            "weight_decay": 0,
        }
        for group, own in zip(groups, settings)
    ]
    return cpr, for_torch, settings


def _refuse_weight_decay(optimizer: str, weight_decay: Any) -> None:
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        raise TypeError(
            f"{optimizer} takes no weight_decay, since CPR replaces it; leave it out, and choose kappa "
            "instead"
        )


def _choose_fused(fused: bool | None, groups: list[dict[str, Any]], *, is_sgd: bool) -> bool:
    """Return ``fused``, or where it is None, True if the parameters allow a fused step.

    Raises:
        ValueError: ``fused=True`` and a parameter has gaps in memory.
    """
    items = [item for group in groups for item in group["params"]]
    params = [item[1] if isinstance(item, tuple) else item for item in items]
    # A frozen parameter may be unfrozen, but not one of whole numbers (quantized).
    params = [p for p in params if p.is_floating_point()]
    gaps = [p for p, local in zip(params, local_parts(params)) if not is_dense(local)]
    if fused and gaps:
        raise ValueError(
            "fused=True needs parameters without gaps in memory, got one of shape "
            f"{tuple(gaps[0].shape)} with strides {gaps[0].stride()}; make it contiguous or leave out "
            "fused"
        )
    if fused is not None:
        return fused
    if gaps or not fused_steps_are_on() or not all(p.device.type in ("cpu", "cuda") for p in params):
        return False
    # torch has no fused SGD of DTensors, and of half precision on the CPU torch 2.6's is wrong.
    return not is_sgd or not any(
        is_sharded(p) or (p.device.type == "cpu" and p.dtype.itemsize < 4) for p in params
    )


class SGDCPR(CPROptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: a module, named parameters, parameters or parameter groups. CPR takes those that are
            trainable now. A group may set its own ``kappa``, ``regularizer``, ``mu`` and ``adaptive``;
            its ``weight_decay`` serves only to select: 0 beside groups with a positive one leaves the
            group out of CPR. So does ``regularize=False``.
        lr, momentum, nesterov, maximize: as in ``torch.optim.SGD``; the defaults of ``momentum`` and
            ``nesterov`` are nnU-Net's.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: None takes a fused step where the parameters allow. True also leaves unscaling to the
            step when ``GradScaler`` is used, as in torch.
        weight_decay: nothing but 0, since CPR takes its place.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with a key that nothing reads.
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.SGD`` do.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = SGDCPR(model, lr=0.1, kappa="ws2")
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.cpr.metrics()["bounded"]
        1.0
    """

    _torch_class = torch.optim.SGD
    _state_keys = ("momentum_buffer",)
    _takes_other_dtypes = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.99,
        nesterov: bool = True,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        weight_decay: float = 0,
    ) -> None:
        _refuse_weight_decay(type(self).__name__, weight_decay)
        known = {
            "lr",
            "momentum",
            "dampening",
            "nesterov",
            "maximize",
            "foreach",
            "differentiable",
            "fused",
        }
        cpr, groups, settings = _built(params, kappa, regularizer, mu, adaptive, known)
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
            fused=_choose_fused(fused, groups, is_sgd=True),
        )
        self._attach(cpr, settings, fused)

    def _allows_fused(self, group: dict[str, Any]) -> bool:
        return group["dampening"] == 0 and not group["differentiable"]

    def _state_of(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        if group["momentum"] == 0:
            return [[]], []
        # Made here for each parameter by itself: torch's fused step makes the momentum of all parameters
        # or of none, so that one whose first gradient comes later breaks it, and leaves it unset when
        # GradScaler skips the first step. From 0 the first step makes it the gradient, as torch does.
        momentum = []
        for p in stepped:
            state = self.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
            momentum.append(state["momentum_buffer"])
        return [momentum], []

    def _rule(self, group: dict[str, Any]) -> Rule:
        return Rule(
            adam=False,
            lr=group["lr"],
            beta1=group["momentum"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )


class AdamCPR(CPROptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: as in :class:`SGDCPR`.
        lr, betas, eps, amsgrad, maximize, capturable: as in ``torch.optim.Adam``.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused, weight_decay: as in :class:`SGDCPR`.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError: a weight decay, or a parameter group with a key that nothing reads.
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.Adam`` do.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> groups = [{"params": [model.weight], "kappa": "k0p1", "mu": 5.0}, {"params": [model.bias]}]
        >>> AdamCPR(groups, lr=1e-3).cpr
        CPR(1 matrices, kappa=KappaK(value=0.1), regularizer=l2, mu=5.0, adaptive=False)
    """

    _torch_class = torch.optim.Adam
    _state_keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _torch_fuses_shards = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        *,
        kappa: Bound | str = KappaWS(1000),
        regularizer: str | Regularizer = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        weight_decay: float = 0,
    ) -> None:
        _refuse_weight_decay(type(self).__name__, weight_decay)
        known = {"lr", "betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay"} | _TORCH_KEYS
        cpr, groups, settings = _built(params, kappa, regularizer, mu, adaptive, known)
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=_choose_fused(fused, groups, is_sgd=False),
        )
        self._attach(cpr, settings, fused)

    def _allows_fused(self, group: dict[str, Any]) -> bool:
        return not group["differentiable"] and not any(isinstance(b, Tensor) for b in group["betas"])

    def _state_of(
        self, group: dict[str, Any], stepped: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        states = [self.state[p] for p in stepped]
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])
        moments = [[state[key] for state in states] for key in self._state_keys[: 2 + group["amsgrad"]]]
        return [*moments, *([] if group["amsgrad"] else [[]])], [state["step"] for state in states]

    def _rule(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return Rule(
            adam=True,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            maximize=group["maximize"],
        )
