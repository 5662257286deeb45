"""Slurm cluster of one node, from Debian's packages slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")


def missing_requirement() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "only root can start a cluster"


@contextmanager
def cluster(folder: Path, requeue_seconds: int = 5) -> Iterator[dict[str, str]]:
    """Start a cluster and yield the environment of its commands.

    It has GPUs of type a100 without hardware, a feature "fast", and jobs that must ask to be requeued.
    Jobs of the partition "urgent" preempt those of "tests". Signals reach all processes of a job.

    Args:
        folder: new folder for its files.
        requeue_seconds: time before a requeued job may start; 120 by default in Slurm.
    """
    folder.mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    controller_port, node_port = _free_ports(2)
    configuration = folder / "slurm.conf"
    configuration.write_text(f"""
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_seconds}
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
ReturnToService=2
MinJobAge=20
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=2
JobRequeue=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} Gres=gpu:a100:2 Feature=fast State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES MaxTime=INFINITE State=UP GraceTime=20
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
""")
    for_gpus = "".join(f"Name=gpu Type=a100 File=/dev/{name}\n" for name in ("null", "zero"))
    (folder / "gres.conf").write_text(for_gpus)
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": _path()}
    for name in ("spool", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = [f"--{what}={folder}/munge.{what.split('-')[0]}" for what in ("socket", "pid-file")]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]
    running = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "w") as output:
                running.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
            time.sleep(1)
        _wait_for_idle(environment, folder)
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_idle(environment: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        said = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
        )
        if said.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.out"))
    raise RuntimeError(f"the cluster does not come up: {said.stdout}{said.stderr}\n{logs}")


def _path() -> str:
    """Return PATH with the folders of daemons, which only root has by default."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
