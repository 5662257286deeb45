"""Check of the tensors of a step, before anything is written.

On a GPU the host's time counts. So whole lists are compared first, by functions that Python maps over
them in C, and each tensor is looked at only where these differ.

Copies from the host to a device that do not synchronize.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.LBFGS)
_STATE_OF_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
_OURS_AND_TORCHS = ("nnunet_cpr.", "torch.optim.")
_grad = attrgetter("grad")
_layout = attrgetter("shape", "dtype", "device", "layout")


def layouts(optimizer: Optimizer) -> dict[int, Any]:
    """Return the layout of each parameter by its id, as far as :func:`check_tensors` needs it.

    That is, for an optimizer whose state is not checked in every step.
    """
    if _is_state_known(optimizer):
        return {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return dict(zip(map(id, params), map(_layout, params)))


def check_tensors(optimizer: Optimizer, before: dict[int, Any]) -> None:
    """Check that gradients and state are like their parameters, as optimizers expect.

    Otherwise an optimizer of torch raises amid its step, when CPR and the optimizer have moved some
    parameters. Torch's and ours make all tensors of the state like the parameter. Other optimizers may
    have their own dtypes, so that only the state of parameters that have changed is checked.

    Args:
        optimizer: optimizer about to take a step.
        before: :func:`layouts` at an earlier step.

    Raises:
        RuntimeError: a gradient or a tensor of the state has another shape, dtype or device than its
            parameter, or a gradient is sparse and the optimizer takes none.
    """
    if not _are_all_alike(optimizer, before):
        _check_each(optimizer, before)


def _are_all_alike(optimizer: Optimizer, before: dict[int, Any]) -> bool:
    """Return True if all tensors are like their parameters; False says nothing."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads: list[Any] = list(map(_grad, params))
    if not all([grad is not None for grad in grads]):
        params = [p for p, grad in zip(params, grads) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    own = list(map(_layout, params))
    if list(map(_layout, grads)) != own:
        return False
    if not _is_state_known(optimizer):
        return list(map(before.get, map(id, params))) == own
    holders, states = list(optimizer.state), list(optimizer.state.values())
    try:
        is_same = list(map(id, holders)) == list(map(id, params))
        expected = own if is_same else list(map(_layout, holders))
        return all(list(map(_layout, column)) == expected for column in _columns(states))
    except (AttributeError, TypeError):  # a value is no tensor, or is missing
        return False


def _columns(states: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield each kind of state, such as the momentum of all parameters, but for counts of steps."""
    for key in dict.fromkeys(chain.from_iterable(states)):
        column: list[Any] = [own.get(key) for own in states]
        if isinstance(column[0], Tensor) and not column[0].ndim:
            if any(map(Tensor.dim, column)):
                yield column
        elif any(t is not None for t in column):
            yield column


def _is_state_known(optimizer: Optimizer) -> bool:
    """Return True if each tensor of the state is like its parameter, but for the number of steps."""
    return _has_known_state(type(optimizer))  # type: ignore[arg-type]


@lru_cache
def _has_known_state(kind: type[Optimizer]) -> bool:
    is_ours = any(c.__module__.startswith("nnunet_cpr.") for c in kind.__mro__)  # or derived from ours
    is_known = is_ours or kind.__module__.startswith("torch.optim.")
    return is_known and not issubclass(kind, _STATE_OF_OTHER_SHAPES)


def _check_each(optimizer: Optimizer, before: dict[int, Any]) -> None:
    """Raise the error of :func:`check_tensors` for the first tensor that is wrong."""
    takes_sparse, checks_all = _takes_sparse_gradients(optimizer), _is_state_known(optimizer)
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            if p.grad.is_sparse and not takes_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__} does not support sparse gradients; build embeddings "
                    "with sparse=False"
                )
            tensors = {"gradient": p.grad}
            if checks_all or before.get(id(p), _layout(p)) != _layout(p):
                tensors |= optimizer.state.get(p, {})
            own = p.shape, p.dtype, p.device
            for key, t in tensors.items():
                is_like = not isinstance(t, Tensor) or (t.shape, t.dtype, t.device) == own
                # The number of steps is a scalar.
                if not is_like and (t.ndim or key == "gradient"):
                    raise RuntimeError(
                        f"{key} of {_name(optimizer, group, k)}: expected {_described(p)} like the "
                        f"parameter, got {_described(t)}; cast, move or resize a model before building "
                        "its optimizer"
                    )


def _takes_sparse_gradients(optimizer: Optimizer) -> bool:
    """Return True if the optimizer takes sparse gradients, or may do so."""
    classes = type(optimizer).__mro__
    is_known = any(c.__module__.startswith(_OURS_AND_TORCHS) and c is not Optimizer for c in classes)
    return isinstance(optimizer, _TAKE_SPARSE) or not is_known


def _name(optimizer: Optimizer, group: dict[str, Any], k: int) -> str:
    if "param_names" in group:
        return f"parameter {group['param_names'][k]!r}"
    return f"parameter {k} of group {[own is group for own in optimizer.param_groups].index(True)}"


def _described(t: Tensor) -> str:
    return f"{t.dtype} of shape {list(t.shape)} on {t.device}"


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` as a vector on ``device`` without waiting for the device.

    A copy from pageable memory would make the host wait for the GPU. torch's allocator keeps the pinned
    memory until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
