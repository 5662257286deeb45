"""Running nnU-Net's commands as processes, with their output in a log file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from nnunet_cpr.nnunet.processes import TERMINATION_SIGNALS, StopRequest
from nnunet_cpr.refusals import Refusal

FOLDER_VARIABLES = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
"""Environment variables that name nnU-Net's folders."""

CPU_THREADS = "NNUNET_CPR_CPU_THREADS"
"""Environment variable with the number of threads of a training on the CPU."""


class CommandStopped(Exception):
    """Command that was stopped, or not started, because this process was asked to end."""


def nnunet_environment(folder: Path, processes: int) -> dict[str, str]:
    """Return environment variables for nnU-Net with its folders below ``folder``.

    Args:
        folder: parent of nnU-Net's three folders.
        processes: number of worker processes.

    Example:
        >>> nnunet_environment(Path("work"), processes=2)["nnUNet_def_n_proc"]
        '2'
    """
    return {
        **os.environ,
        **{name: str(folder / name) for name in FOLDER_VARIABLES},
        "nnUNet_def_n_proc": str(processes),
        "nnUNet_n_proc_DA": str(processes),
        "nnUNet_wandb_enabled": "0",
        # Threads that wait in a busy loop make two processes on few cores many times slower.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def run(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    on_wait: Callable[[int], None] = lambda process: None,
    on_start: Callable[[int], None] = lambda process: None,
    request: StopRequest | None = None,
    stop_seconds: float = 60.0,
    has_ranks: bool = False,
) -> None:
    """Run a command to completion; then, and on an exception, what is left of it is killed.

    A killed command leaves its data loaders, which need memory for minutes. A request to stop sends
    SIGTERM to the command, not to its child processes, and waits until it has written its state and
    ended, at most ``stop_seconds``.

    Args:
        command: its name, searched first in the scripts folder of this Python, and its arguments.
        log: file for its output.
        environment: its environment variables.
        on_wait: called several times a second with the process id while it runs.
        on_start: called once with the process id, which is also the id of its process group.
        request: request to stop, recorded meanwhile.
        stop_seconds: time that the command has to end after SIGTERM.
        has_ranks: True if its child processes are the ranks of a distributed training. They write the
            state after the end of the command, so that this function waits for them as well.

    Raises:
        Refusal: it failed.
        OSError: it is not installed, or the log cannot be written.
        CommandStopped: there was a request to stop.
    """
    request = StopRequest() if request is None else request
    if request:
        raise CommandStopped
    search = os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)])
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "PATH": search},
            start_new_session=True,  # a process group, so that its workers can be killed with it
        )
        try:
            on_start(process.pid)
            while process.poll() is None and not request:
                on_wait(process.pid)
                time.sleep(0.2)
            if not request and _ended_by_signal(process.returncode):
                # Slurm may signal all processes of a job; then ours follows within milliseconds.
                time.sleep(1)
            if request:
                _terminate(process, request, stop_seconds, has_ranks)
                raise CommandStopped
        finally:
            _kill_group(process)
    if (status := process.returncode) != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = " | ".join([line for line in lines if line.strip()][-3:])
        raise Refusal(f"{command[0]} {_describe_end(status)}, see {log}", f"its last lines: {tail}")


def _describe_end(status: int) -> str:
    """Return an exit status other than 0 in words."""
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "was killed, perhaps out of memory"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"


def _ended_by_signal(status: int) -> bool:
    return any(status in (-number, 128 + number) for number in TERMINATION_SIGNALS)


def _terminate(
    process: subprocess.Popen[bytes], request: StopRequest, seconds: float, has_ranks: bool
) -> None:
    """Ask a process to end and wait for it, at most for some seconds or until a second Ctrl-C."""
    process.terminate()
    end = time.monotonic() + seconds
    while process.poll() is None or (has_ranks and _group_runs(process.pid)):
        if time.monotonic() > end or request.signals.count(signal.SIGINT) > 1:
            break
        time.sleep(0.1)


def _group_runs(group: int) -> bool:
    """Return True if a process of a process group runs."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            is_member = os.getpgid(process.pid) == group
            if is_member and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process group, and wait until its memory is free."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while _group_runs(process.pid) and time.monotonic() < end:
            time.sleep(0.1)
    process.wait()
