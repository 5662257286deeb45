"""SGD and Adam with CPR in place of weight decay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from nnunet_cpr.bounds import Bound, KappaWS
from nnunet_cpr.cpr import CPR
from nnunet_cpr.kernels import one_pass_for
from nnunet_cpr.kernels.one_pass import Rule, StepTensors, laid_out_like
from nnunet_cpr.row_norms import is_dense
from nnunet_cpr.selection import Params, param_groups
from nnunet_cpr.sharding import is_sharded, local_parts, refuse_zero_redundancy


class CPROptimizer(torch.optim.Optimizer, ABC):
    """What the two optimizers share: they build their CPR from their own parameters.

    A step goes one of two ways. The plain one is CPR's correction and then torch's own step. The other
    takes both in one pass (:mod:`nnunet_cpr.kernels`); for that a subclass says what its step reads and
    writes, and by which rule.
    """

    cpr: CPR
    _torch_class: type[torch.optim.Optimizer]
    _choose_one_pass = staticmethod(one_pass_for)

    def _attach(self, cpr: CPR) -> None:
        refuse_zero_redundancy(type(self).__name__, f"torch.optim.{self._torch_class.__name__}")
        self.cpr = cpr
        cpr.attach(self)
        self.register_load_state_dict_post_hook(_copy_state)
        self._step = torch.compiler.disable(self._step_eagerly)
        self._look_where_parameters_are()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; CPR's update comes before it, and after the closure.

        ``torch.compile`` leaves it as it is.

        Returns:
            What the closure returned.
        """
        return self._step(closure)

    @torch.no_grad()
    def _step_eagerly(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._places != self._places_now():
            self._look_where_parameters_are()
        _lay_out_gradients(self)
        # Here and not in a hook: what hooks do to gradients and parameters comes before.
        correction = self.cpr.before_step(self)
        one_pass = self.cpr.one_pass
        if one_pass is not None and correction is not None:
            one_pass.step(correction)
            return loss
        if one_pass is not None:
            one_pass.forget_measure()
        self.prepare_torch_step()
        _without_hooks(self._torch_class.step)(self)
        return loss

    def _places_now(self) -> list[int]:
        params = local_parts(p for group in self.param_groups for p in group["params"])
        return [p.data_ptr() for p in params] + [p.numel() for p in params]

    def _look_where_parameters_are(self) -> None:
        """When they are elsewhere, on another device maybe, or of another size."""
        self._places = self._places_now()
        _lay_out_state(self)
        self.cpr.one_pass = self._choose_one_pass(self)

    def prepare_torch_step(self) -> None:
        """What torch's own step needs beforehand."""

    @abstractmethod
    def allows_one_pass(self, group: dict[str, Any]) -> bool:
        """Whether the group's settings are such as a step in one pass takes."""

    @abstractmethod
    def step_tensors(self, group: dict[str, Any]) -> StepTensors:
        """The group's tensors for a step that is about to be taken; missing ones are made."""

    @abstractmethod
    def rule(self, group: dict[str, Any]) -> Rule:
        """The settings of the step."""

    def after_step(self, tensors: StepTensors) -> None:
        """What is left to do when all tensors of a group were stepped."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch does while the optimizer is built; later it is refused.

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
    """A torch optimizer's step. torch wraps it so that it runs the hooks; for our step they have run."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Fused steps go through memory; on the CPU torch does not look whether the strides agree."""
    for group in optimizer.param_groups:
        if group["fused"]:
            for p in group["params"]:
                grad = p.grad
                if grad is None or grad.layout is not torch.strided:
                    continue
                if grad.is_contiguous() and p.is_contiguous():
                    continue
                p.grad = laid_out_like(p, grad)


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """The same for a state that was saved from parameters with other strides."""
    fused = [p for group in optimizer.param_groups if group["fused"] for p in group["params"]]
    for p in fused:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[p][key] = laid_out_like(p, value)


def _copy_state(optimizer: torch.optim.Optimizer) -> None:
    """Have a state of one's own after loading.

    torch keeps the very tensors of the dict that was loaded: the next steps would change them, and a
    checkpoint that is read with ``mmap`` could not be written over.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.clone()
    _lay_out_state(optimizer)


def _torch_groups(params: Params, named: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups for torch, with the weight decay that CPR replaces at 0.

    A module makes one group in its own order, as ``torch.optim.SGD(module.parameters())`` does, so
    that either loads the other's state.
    """
    if isinstance(params, torch.nn.Module):
        return [{"params": list(params.parameters()), "weight_decay": 0}]
    return [
        {
            **{key: value for key, value in group.items() if key != "regularize"},
            "params": [p for _, p in group["params"]],
            "weight_decay": 0,
        }
        for group in named
    ]


def _fused_is_possible(params: Params, groups: list[dict[str, Any]]) -> bool:
    if isinstance(params, torch.nn.Module) and any(
        getattr(module, "sparse", False) for module in params.modules()
    ):
        return False  # sparse gradients of embeddings
    return all(
        p.device.type in ("cpu", "cuda") and is_dense(p) for p in local_parts(_may_be_trained(groups))
    )


def _fused_sgd_is_possible(params: Params, groups: list[dict[str, Any]]) -> bool:
    # Of DTensors torch has none, and of half precision torch 2.6's on the CPU is wrong.
    lacking = any(
        is_sharded(p) or (p.device.type == "cpu" and p.dtype.itemsize < 4)
        for p in _may_be_trained(groups)
    )
    return _fused_is_possible(params, groups) and not lacking


def _may_be_trained(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Now or later: a frozen parameter may be unfrozen, but not one of whole numbers (quantized)."""
    return [p for group in groups for p in group["params"] if p.is_floating_point()]


class SGDCPR(CPROptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: a module, named parameters, parameters or parameter groups. CPR takes those that are
            trainable now. A group's
            ``weight_decay`` serves only to select: 0 beside groups with a positive one leaves the
            group out of CPR. So does ``regularize=False``.
        lr, momentum, nesterov, maximize: as in ``torch.optim.SGD``; the defaults are nnU-Net's.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: torch's fused step; None takes it where the parameters allow.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.SGD`` do.
    """

    _torch_class = torch.optim.SGD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.99,
        nesterov: bool = True,
        *,
        kappa: Bound = KappaWS(1000),
        regularizer: str = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        named = param_groups(params)
        cpr = CPR(named, kappa=kappa, regularizer=regularizer, mu=mu, adaptive=adaptive)
        groups = _torch_groups(params, named)
        super().__init__(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
            fused=_fused_sgd_is_possible(params, groups) if fused is None else fused,
        )
        self._attach(cpr)

    def allows_one_pass(self, group: dict[str, Any]) -> bool:
        return group["dampening"] == 0 and not group["differentiable"]

    def step_tensors(self, group: dict[str, Any]) -> StepTensors:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        momentum: list[Any] = []
        self._init_group(group, params, grads, momentum)
        for i, buffer in enumerate(momentum):
            if buffer is None:  # from 0 the first step makes it the gradient, as torch does
                momentum[i] = self.state[params[i]]["momentum_buffer"] = torch.zeros_like(params[i])
        return StepTensors(params, grads, [momentum])

    def prepare_torch_step(self) -> None:
        # torch's fused step makes missing momentum for all parameters or for none, so that one whose
        # first gradient comes later breaks it, and leaves it unset when GradScaler skips the first step.
        for group in self.param_groups:
            if group["fused"] and self.allows_one_pass(group):
                self.step_tensors(group)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule(adam=False, beta1=group["momentum"], nesterov=group["nesterov"])


class AdamCPR(CPROptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with :class:`~nnunet_cpr.cpr.CPR` in place of weight decay.

    Args:
        params: as in :class:`SGDCPR`.
        lr, betas, eps, amsgrad, maximize, capturable: as in ``torch.optim.Adam``.
        kappa, regularizer, mu, adaptive: as in :class:`~nnunet_cpr.cpr.CPR`.
        fused: torch's fused step; None takes it where the parameters allow.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.

    Raises:
        TypeError, ValueError: as :class:`~nnunet_cpr.cpr.CPR` and ``torch.optim.Adam`` do.
    """

    _torch_class = torch.optim.Adam

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        *,
        kappa: Bound = KappaWS(1000),
        regularizer: str = "l2",
        mu: float = 1.0,
        adaptive: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        named = param_groups(params)
        cpr = CPR(named, kappa=kappa, regularizer=regularizer, mu=mu, adaptive=adaptive)
        groups = _torch_groups(params, named)
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=_fused_is_possible(params, groups) if fused is None else fused,
        )
        self._attach(cpr)

    def allows_one_pass(self, group: dict[str, Any]) -> bool:
        return not group["differentiable"] and not any(isinstance(b, Tensor) for b in group["betas"])

    def step_tensors(self, group: dict[str, Any]) -> StepTensors:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        first: list[Tensor] = []
        second: list[Tensor] = []
        largest: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, grads, first, second, largest, steps)
        if steps:
            torch._foreach_add_(steps, 1)
        return StepTensors(params, grads, [first, second, largest, steps])

    def rule(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return Rule(adam=True, beta1=beta1, beta2=beta2, eps=group["eps"])

    def after_step(self, tensors: StepTensors) -> None:
        found_inf = getattr(self, "found_inf", None)
        steps = tensors.state[-1]
        if found_inf is not None and steps:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
