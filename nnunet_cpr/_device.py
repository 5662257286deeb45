"""Copies from the host to a device that do not synchronize."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` as a vector on ``device`` without waiting for the device.

    A copy from pageable memory would make the host wait for the GPU. torch's allocator keeps the pinned
    memory until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
