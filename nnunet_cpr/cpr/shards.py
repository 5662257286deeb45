"""Support for DTensors (FSDP2, tensor parallelism) and ``torch.distributed.checkpoint``.

Elementwise operations run on the process that has the elements. Sums over all elements of a matrix are
added up over the processes, for all matrices in one all-reduce.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnunet_cpr.cpr.tensors import to_device

_PLAIN = (Tensor, torch.nn.Parameter)
_FLATTENED = {"_fsdp_flattened": "FullyShardedDataParallel (FSDP1)", "ds_id": "DeepSpeed's ZeRO-3"}
"""Attributes that mark parts of flat parameters, and their owners."""


def is_sharded(t: Tensor) -> bool:
    """Return True if the tensor is a DTensor."""
    if type(t) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # imported wherever there are DTensors
    return module is not None and isinstance(t, module.DTensor)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local part of each DTensor, and plain tensors unchanged."""
    with torch.no_grad():
        return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def has_same_placements(p: Tensor, t: Tensor) -> bool:
    """Return True if ``t`` is placed as its parameter ``p``, or both are plain tensors."""
    if not is_sharded(p) or not is_sharded(t):
        return is_sharded(p) == is_sharded(t)
    return t.placements == p.placements and t.device_mesh == p.device_mesh  # type: ignore[attr-defined]


def check_not_flattened(name: str, p: Tensor) -> None:
    """Check that a parameter is not a part of a flat parameter, in which matrices have no boundaries.

    Raises:
        TypeError: FSDP1 or DeepSpeed's ZeRO-3 has flattened it.
    """
    for attribute, owner in _FLATTENED.items():
        if hasattr(p, attribute):
            raise TypeError(
                f"parameter {name!r}: expected a parameter with its own shape, got a part of a flat "
                f"parameter of {owner}; shard the model with torch's fully_shard (FSDP2)"
            )


def is_checkpoint_imported() -> bool:
    """Return True if optimizers may be saved and loaded by ``torch.distributed.checkpoint``."""
    return "torch.distributed.checkpoint.state_dict" in sys.modules


def is_state_initialization(optimizer: Optimizer) -> bool:
    """Return True if a step is not a training step, but initializes the state of an optimizer without.

    Before ``torch.distributed.checkpoint`` saves or loads the state of an optimizer without any, it
    creates the state by a step with learning rates and gradients of 0.
    """
    if not is_checkpoint_imported():
        return False
    rates = [group.get("lr", 0) for group in optimizer.param_groups]
    # It sets a CPU tensor; reading one from a GPU would make the host wait.
    if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0 for lr in rates):
        return False
    # Gradients tell the first step of a learning-rate warm-up from 0, which is a training step.
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(map(_is_nonzero, grads))


def _is_nonzero(t: Tensor) -> bool:
    """Return True if an element is not 0, on any process for DTensors."""
    total = t.detach().abs().sum()
    return bool(total.full_tensor() if is_sharded(total) else total)  # type: ignore[attr-defined]


class Shards:
    """Distribution of the elements of J parameter matrices over processes.

    Args:
        parameters: the parameter matrices.
        names: their names, for error messages.

    Attributes:
        reductions: process groups to add up over, each with the share of every matrix, 0 or 1; empty if
            this process has all elements.

    Raises:
        TypeError: a matrix has the placement ``Partial``.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        sharded: dict[str, tuple[Any, set[int]]] = {}  # process group and the matrices sharded over it
        for j, (name, p) in enumerate(zip(names, parameters)):
            if not is_sharded(p):
                continue
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            for dim, placement in enumerate(placements):
                if placement.is_partial():
                    raise TypeError(
                        f"parameter {name!r}: expected the placement Shard or Replicate, got Partial"
                    )
                if not placement.is_replicate() and mesh.size(dim) > 1:
                    group = mesh.get_group(dim)
                    sharded.setdefault(group.group_name, (group, set()))[1].add(j)
        # For matrices that are replicated over a group only its first process contributes the sum, so
        # that one all-reduce serves all matrices.
        self.reductions = [
            (group, [int(j in own or group.rank() == 0) for j in range(len(parameters))])
            for group, own in sharded.values()
        ]

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all elements from those over the local elements, ``[rows, J]``.

        Takes one all-reduce for each mesh dimension that a matrix is sharded over, in which all
        processes must take part.
        """
        for group, shares in self.reductions:
            sums = sums * to_device(shares, sums.dtype, sums.device)
            torch.distributed.all_reduce(sums, group=group)
        return sums
