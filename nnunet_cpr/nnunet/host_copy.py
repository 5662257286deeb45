"""Copy of a training's state in host memory."""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnunet_cpr._files import atomic_torch_save


def capture(save: Callable[[str], None], path: str) -> dict[str, Any]:
    """Return the objects that ``save(path)`` passes to ``torch.save``, without writing them.

    Trainers add to nnU-Net's checkpoints, and write files beside them, by overriding
    ``save_checkpoint``, and nnU-Net has no function that only builds the content.

    Returns:
        The objects by their paths, with the tensors of the training itself.

    Example:
        >>> capture(lambda path: torch.save({"epoch": 3}, path), "checkpoint.pth")
        {'checkpoint.pth': {'epoch': 3}}
    """
    captured: dict[str, Any] = {}
    with _saves_replaced(captured.__setitem__):
        save(path)
    return captured


def atomic_saves() -> AbstractContextManager[None]:
    """Make ``torch.save`` in this context replace a file at once or leave it as it is.

    Raises:
        OSError: as :func:`nnunet_cpr._files.atomic_torch_save`.
    """
    return _saves_replaced(lambda path, content: atomic_torch_save(content, Path(path)))


@contextmanager
def _saves_replaced(save: Callable[[str, Any], None]) -> Iterator[None]:
    write = torch.save

    def to_path(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike) and not args and not kwargs:
            torch.save = write  # which ``save`` may use
            try:
                save(os.fspath(f), obj)
            finally:
                torch.save = to_path
        else:
            write(obj, f, *args, **kwargs)

    torch.save = to_path
    try:
        yield
    finally:
        torch.save = write


class HostCopy:
    """Copy of an object with tensors, whose memory is reused by later copies.

    Tensors that share memory share it in the copy, so that a file of the copy is not larger. The host
    memory of CUDA tensors is pinned.

    Example:
        >>> copy, weight = HostCopy(), torch.zeros(2)
        >>> copy.update({"weight": weight})
        >>> weight += 1
        >>> copy.content()
        {'weight': tensor([0., 0.])}
    """

    def __init__(self) -> None:
        self._pickled = b""
        self._tensors: list[Tensor] = []
        self._buffers: list[Tensor] = []

    def update(self, content: Any) -> None:
        """Copy an object in place of the previous one."""
        self._pickled = b""  # until the copy is complete
        output = io.BytesIO()
        pickler = _Pickler(output)
        pickler.dump(content)
        self._copy_tensors(pickler.tensors)
        self._pickled = output.getvalue()

    def content(self) -> Any:
        """Return the object, with tensors in the memory of this copy, or None if there is none."""
        if not self._pickled:
            return None
        return _Unpickler(io.BytesIO(self._pickled), self._tensors).load()

    def _copy_tensors(self, tensors: list[Tensor]) -> None:
        spare: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        for buffer in self._buffers:
            spare[buffer.nbytes, buffer.is_pinned()].append(buffer)
        copies: dict[tuple[torch.device, int], Tensor] = {}
        self._buffers, self._tensors = [], []
        for tensor in tensors:
            if not _is_plain(tensor):
                self._tensors.append(tensor.detach().cpu().clone())
                continue
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr()
            if key not in copies:
                pinned = tensor.is_cuda and storage.nbytes() > 0
                found = spare[storage.nbytes(), pinned]
                buffer = found.pop() if found else _new_buffer(storage.nbytes(), pinned)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copies[key] = buffer.copy_(source, non_blocking=pinned)
            copy = torch.empty(0, dtype=tensor.dtype).set_(
                copies[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            self._tensors.append(copy)
        self._buffers = list(copies.values())
        for device in {device for device, _ in copies if device.type == "cuda"}:
            torch.cuda.synchronize(device)


class _Pickler(pickle.Pickler):
    """Pickler that replaces tensors by their index in ``tensors``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Unpickler of what :class:`_Pickler` writes."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is described by its storage, dtype, size and stride."""
    is_tensor = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_tensor and tensor.layout is torch.strided and not tensor.is_quantized


def _new_buffer(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
