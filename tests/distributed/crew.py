"""Processes on this machine that run functions together over gloo."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 600  # seconds until a function that does not come back counts as hanging


class Crew:
    """Group of ``size`` processes that run functions."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._members = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of ``function(*args)`` of each process.

        Raises:
            AssertionError: it raised on one of them, or did not come back.
        """
        for _, pipe in self._members:
            pipe.send((function, args))
        answers = []
        for rank, (_, pipe) in enumerate(self._members):
            assert pipe.poll(PATIENCE), f"rank {rank} did not come back from {function.__name__}{args}"
            answers.append(pipe.recv())
        for rank, (problem, _) in enumerate(answers):
            assert problem is None, f"on rank {rank}: {problem}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(tempfile.gettempdir())
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        torch.manual_seed(0)
        try:
            pipe.send((None, function(*args)))
        except Exception:  # the test fails with it
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
