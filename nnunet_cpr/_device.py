"""From the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` as a vector on ``device``; a GPU fetches it when it gets there.

    A copy from pageable memory would make the host wait for the GPU. The pinned memory is kept by
    torch's allocator until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
