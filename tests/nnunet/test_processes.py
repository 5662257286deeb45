"""Signals to a process and to those that it forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from nnunet_cpr.nnunet.processes import Terminated, raise_on_termination, record_stop_signals

POOLS = """
import multiprocessing
from nnunet_cpr.nnunet.processes import raise_on_termination

fork = multiprocessing.get_context("fork")
with raise_on_termination():
    for _ in range(100):
        with fork.Pool(8) as pool:
            pool.map(abs, [1])
print("ended")
"""

SIGNAL_IN_FORK = """
import os, signal
def send(): os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork({when}=send)  # before ours are registered, so that it runs amid them
from nnunet_cpr.nnunet.processes import Terminated, raise_on_termination

try:
    with raise_on_termination():
        child = os.fork()
        if child == 0:
            signal.pause()
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
except Terminated as error:
    print("parent", error)
    os.kill(child, signal.SIGKILL)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout


def test_pools_of_forked_processes_end() -> None:
    """``Pool.terminate`` waits for processes to which it has sent SIGTERM once, as they start."""
    assert run(POOLS) == "ended\n"


def test_signal_to_a_child_before_its_first_instruction_ends_it() -> None:
    assert run(SIGNAL_IN_FORK.format(when="after_in_child")) == f"child {-signal.SIGTERM}\n"


def test_signal_to_the_parent_amid_a_fork_is_raised_after_it() -> None:
    assert run(SIGNAL_IN_FORK.format(when="before")) == "parent SIGTERM\n"


def test_child_has_the_handlers_from_before_nested_contexts() -> None:
    def show(connection: object) -> None:
        own = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        connection.send((own == [signal.SIG_DFL, signal.default_int_handler], blocked))
        with raise_on_termination():
            connection.send(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        connection.send(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with raise_on_termination(), record_stop_signals():
        process = fork.Process(target=show, args=(sender,))
        process.start()
        assert receiver.poll(300) and receiver.recv() == (True, before)
        assert [receiver.recv(), receiver.recv()] == [False, True]
        process.join(300)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    with pytest.raises(Terminated), raise_on_termination():
        os.kill(os.getpid(), signal.SIGTERM)
