"""Base class of the optimizers with CPR in place of weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._distributed import check_not_in_zero_redundancy
from nnunet_cpr._validation import short_repr
from nnunet_cpr.cpr import CPR, CPRSettings


class CPROptimizer(torch.optim.Optimizer):
    """Base class of the optimizers with CPR in place of weight decay, beside an optimizer without CPR.

    CPR's settings are in the parameter groups, where they are saved but must not be changed.

    Attributes:
        cpr: the attached :class:`~nnunet_cpr.cpr.CPR`.
    """

    cpr: CPR
    _torch_class: type[torch.optim.Optimizer]
    """The optimizer without CPR."""

    def _attach(self, cpr: CPR, settings: list[dict[str, Any]]) -> None:
        """Attach CPR with the settings of each group, at the end of the construction."""
        base = self._torch_class
        package = base.__module__.rpartition(".")[0]  # torch.optim, or nnunet_cpr.optimizers of Muon
        check_not_in_zero_redundancy(type(self).__name__, f"{package}.{base.__name__}")
        self.cpr = cpr
        self._settings = settings
        self._initial_groups = self._group_ids()
        self.register_step_pre_hook(torch.compiler.disable(_check_settings))
        cpr.attach(self)
        self.register_load_state_dict_post_hook(_restore_settings)  # type: ignore[arg-type]

    def _group_ids(self) -> list[tuple[int, ...]]:
        """Return the size and the first parameter of each group."""
        return [(len(g["params"]), *map(id, g["params"][:1])) for g in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction.

        Raises:
            RuntimeError: the optimizer has been built.
        """
        if hasattr(self, "cpr"):
            raise RuntimeError(
                f"{type(self).__name__}: expected all parameters at construction, got more later; build "
                "a new optimizer, since bounds and multipliers belong to the initial parameters"
            )
        super().add_param_group(param_group)


def _check_settings(optimizer: CPROptimizer, args: Any, kwargs: Any) -> None:
    """Check before a step that CPR's settings in the parameter groups have not been changed.

    Raises:
        ValueError: they have; or groups were added, removed or reordered.
    """
    if optimizer._initial_groups != optimizer._group_ids():
        optimizer.cpr._check_optimizer(optimizer)  # names the parameters that it lacks, if any
        raise ValueError(
            f"param_groups of {type(optimizer).__name__}: expected the initial groups, got some added, "
            "removed or reordered; build a new optimizer"
        )
    for i, (group, own) in enumerate(zip(optimizer.param_groups, optimizer._settings)):
        for key in CPRSettings.KEYS:
            now = group.get(key)
            if isinstance(now, Tensor) or now != own[key]:
                raise ValueError(
                    f"{key} of parameter group {i}: expected {own[key]!r} as at construction, got "
                    f"{short_repr(now)}; build a new optimizer to change settings of CPR"
                )


def _restore_settings(optimizer: CPROptimizer) -> None:
    """Restore CPR's settings in the groups; a state with other settings has been refused before."""
    for group, settings in zip(optimizer.param_groups, optimizer._settings):
        group.update(settings)
