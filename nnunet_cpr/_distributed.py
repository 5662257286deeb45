"""Parameters whose elements lie on several processes: DTensors, of FSDP2 or of tensor parallelism.

What is computed for each element is computed on the process that has it; what is a sum over all
elements of a matrix is added up over the processes, for all matrices at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._device import to_device

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(t: Tensor) -> bool:
    """Whether this is a DTensor."""
    if type(t) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(t, module.DTensor)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The elements of each tensor that this process has; plain tensors as they are."""
    with torch.no_grad():
        return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def is_placed_alike(p: Tensor, t: Tensor) -> bool:
    """Return True if a gradient or state has its parameter's placements, or both are plain tensors."""
    if not is_sharded(p) or not is_sharded(t):
        return is_sharded(p) == is_sharded(t)
    return t.placements == p.placements and t.device_mesh == p.device_mesh  # type: ignore[attr-defined]


def refuse_flat_shards(name: str, p: Tensor) -> None:
    """Raise for a parameter in which its matrix cannot be told from others.

    Raises:
        TypeError: the first version of FullyShardedDataParallel or DeepSpeed's ZeRO-3 has flattened it.
    """
    whose = None
    if getattr(p, "_fsdp_flattened", False):
        whose = "torch's first FullyShardedDataParallel"
    elif hasattr(p, "ds_id"):
        whose = "DeepSpeed's ZeRO-3"
    if whose is not None:
        raise TypeError(
            f"parameter {name!r} is a piece of a flat parameter of {whose}, in which no matrix can be "
            "told from another; shard the model with torch's fully_shard (FSDP2)"
        )


def refuse_zero_redundancy(ours: str, theirs: str) -> None:
    """Raise where ``ZeroRedundancyOptimizer`` is building an optimizer with a CPR of its own.

    Each of its processes would train rightly, and its ``state_dict()`` would leave CPR's state out.

    Raises:
        TypeError: it is.
    """
    if _is_called_by("torch.distributed.optim.zero_redundancy_optimizer", "_init_local_optimizer"):
        raise TypeError(
            f"ZeroRedundancyOptimizer leaves the bounds and multipliers of {ours} out of its "
            f"state_dict(); give it {theirs} and attach CPR(model) to it"
        )


def is_saved_in_shards() -> bool:
    """Whether ``torch.distributed.checkpoint`` is asking for an optimizer's state."""
    return _is_called_by("torch.distributed.checkpoint.state_dict", "_get_optim_state_dict")


def only_makes_state() -> bool:
    """Whether a step is no training step, but one of ``torch.distributed.checkpoint``.

    Before it saves or loads the state of an optimizer that has none yet, it has it made by a step with a
    learning rate and gradients of 0.
    """
    return _is_called_by("torch.distributed.checkpoint.state_dict", "_init_optim_state")


def _is_called_by(module: str, function: str) -> bool:
    """Whether a function is being called; nothing but its call tells what torch is about."""
    if module not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


class Shards:
    """How the processes share the elements of J matrices.

    Args:
        parameters: the matrices.
        names: what messages call them.

    Raises:
        TypeError: a matrix is a sum over processes (a DTensor that is ``Partial``).
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        groups: dict[str, Any] = {}
        sharded: dict[str, set[int]] = {}  # over a group's processes, which matrices
        for j, (name, p) in enumerate(zip(names, parameters)):
            if not is_sharded(p):
                continue
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            for dim, placement in enumerate(placements):
                if placement.is_partial():
                    raise TypeError(
                        f"parameter {name!r} is a DTensor that is Partial, which is no parameter"
                    )
                if not placement.is_replicate() and mesh.size(dim) > 1:
                    group = mesh.get_group(dim)
                    groups[group.group_name] = group
                    sharded.setdefault(group.group_name, set()).add(j)
        # Of what all processes of a group have, only its first tells: so that one all-reduce serves all.
        self._reductions = [
            (
                group,
                None
                if len(sharded[key]) == len(parameters)
                else [int(j in sharded[key] or group.rank() == 0) for j in range(len(parameters))],
            )
            for key, group in groups.items()
        ]

    def total(self, sums: Tensor) -> Tensor:
        """Sums over all elements, ``[rows, J]``, from those over the elements of this process.

        One all-reduce for each dimension of the mesh that a matrix is sharded over, in which all
        processes have to take part.
        """
        for group, shares in self._reductions:
            sums = sums.clone() if shares is None else sums * to_device(shares, sums.dtype, sums.device)
            torch.distributed.all_reduce(sums, group=group)
        return sums
