"""nnU-Net's own commands, run as processes with their output in a log file."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class CommandFailed(RuntimeError):
    """A command ended with an exit status other than 0; the message has the end of its log."""


def nnunet_environment(folder: Path, processes: int) -> dict[str, str]:
    """The environment for nnU-Net with all of its folders below ``folder``."""
    return {
        **os.environ,
        "nnUNet_raw": str(folder / "nnUNet_raw"),
        "nnUNet_preprocessed": str(folder / "nnUNet_preprocessed"),
        "nnUNet_results": str(folder / "nnUNet_results"),
        "nnUNet_def_n_proc": str(processes),
        "nnUNet_n_proc_DA": str(processes),
        "nnUNet_wandb_enabled": "0",
        # Threads that wait by spinning make two busy processes on few cores many times slower.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def run(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    on_wait: Callable[[], None] = lambda: None,
    on_start: Callable[[int], None] = lambda process: None,
) -> None:
    """Run a command to its end; an exception ends it and whatever it has started.

    Args:
        command: its name, found beside this Python first, and its arguments.
        log: file for everything it prints.
        environment: all of its environment variables.
        on_wait: called a few times a second while it runs.
        on_start: called once with its process number, which is that of its group, too.

    Raises:
        CommandFailed: it is not installed, or it failed.
    """
    scripts = sysconfig.get_path("scripts")
    search = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
    program = shutil.which(command[0], path=search)
    if program is None:
        raise CommandFailed(f"the command {command[0]} is not installed; run: pip install nnunetv2")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as output:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # its worker processes end with it
        )
        try:
            on_start(process.pid)
            while process.poll() is None:
                on_wait()
                time.sleep(0.2)
        except BaseException:
            _end_group(process)
            raise
    if process.returncode != 0:
        tail = " | ".join(last_lines(log, 3))
        raise CommandFailed(f"{command[0]} {_ending(process.returncode)}, see {log}: {tail}")


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that say something."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def _ending(status: int) -> str:
    if status >= 0:
        return "failed"
    import signal

    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-status, f'signal {-status}')}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        import signal

        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
