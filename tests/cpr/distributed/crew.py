"""Processes on this machine that run functions together over gloo."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 600  # seconds until a function that does not come back counts as hanging


class Crew:
    """Group of ``size`` processes that run functions."""

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self._members = [context.Pool(1, _join, (rank, size, port)) for rank in range(size)]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of ``function(*args)`` of each process, or raise what one of them raises."""
        answers = [member.apply_async(_run, (function, args)) for member in self._members]
        return [answer.get(PATIENCE) for answer in answers]

    def close(self) -> None:
        for member in self._members:
            member.terminate()


def _join(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(tempfile.gettempdir())
    dist.init_process_group("gloo", rank=rank, world_size=size)


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return function(*args)
