"""Trainings resumed in another process equal uninterrupted ones bit for bit."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nnunet_cpr import KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.optimizers import kernels
from tests.helpers.bounds import SHORT
from tests.helpers.examples import examples
from tests.helpers.resume_cases import differences
from tests.optimizers.trainings import (
    BASELINES,
    CHUNK,
    OURS,
    STEPS,
    TORCH,
    Case,
    Training,
    resume,
    split_small_matrices,
)


@pytest.fixture(autouse=True)
def _like_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", CHUNK)


class Worker:
    """Process that resumes trainings."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.result = folder / "checkpoint.pt", folder / "result.pt"
        self._pool = multiprocessing.get_context("spawn").Pool(1, split_small_matrices)

    def go_on(
        self, case: Case, begin: int, again_at: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the final state of a training resumed from before step ``begin``."""
        self._pool.apply(resume, (case, self.checkpoint, self.result, begin, again_at), options)
        return torch.load(self.result, weights_only=True)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("worker"))
    yield worker
    worker._pool.terminate()


BOUNDS = st.one_of(
    st.sampled_from(SHORT),
    st.builds(KappaK, st.floats(1e-3, 0.1)),
    st.builds(KappaKI0, st.floats(0.5, 1.5)),
    st.builds(KappaWS, st.integers(1, STEPS + 2)),
)
HALF = ("bfloat16", "float16")


@st.composite
def cases(draw: st.DrawFn, optimizers: tuple[str, ...] = (*OURS, *TORCH)) -> Case:
    optimizer = draw(st.sampled_from(optimizers))
    dtypes = ["float32", "float32", "float64", *HALF]
    if optimizer in ("sgd-fused", "lbfgs"):  # torch's own are not for half precision on a CPU
        dtypes = ["float32", "float64"]
    if optimizer == "nadam":  # torch loads its float32 mu_product as a tensor of the parameter's dtype
        dtypes = ["float32"]
    dtype = draw(st.sampled_from(dtypes))
    closure = draw(st.booleans()) and draw(st.booleans())
    may_scale = dtype == "float32" and not closure and optimizer != "lbfgs"
    scaler = may_scale and draw(st.booleans())
    breaks = [None, None, 0, 5, 11]
    if optimizer == "sgd-fused" and scaler:  # torch's momentum is undefined if its first step is skipped
        breaks.remove(0)
    return Case(
        optimizer=optimizer,
        bound=draw(BOUNDS),
        regularizer=draw(st.sampled_from(["l2", "l2", "l1", "std", "huber"])),
        adaptive=draw(st.booleans()),
        dtype=dtype,
        backend=draw(st.sampled_from(["chosen", "chosen", "plain"])) if optimizer in OURS else "chosen",
        channels_last=draw(st.booleans()) and optimizer != "lbfgs",
        closure=closure,
        breaks_at=draw(st.sampled_from(breaks)) if optimizer != "lbfgs" else None,
        scaler=scaler,
    )


def check(worker: Worker, case: Case, stop: int, again_at: int | None = None, **options: Any) -> None:
    """Compare an uninterrupted training with one resumed in the worker before step ``stop``."""
    training = Training(case)
    training.run(0, stop)
    training.save(worker.checkpoint)
    training.run(stop)
    resumed = worker.go_on(case, stop, again_at, **options)
    assert differences(training.state(), resumed) == []


any_stop = {"case": cases(), "stop": st.integers(0, STEPS), "mmap": st.booleans()}
again = st.none() | st.integers(0, STEPS)

# Momenta whose strides are not the parameter's, in half precision, which rounds by strides.
contiguous_momenta = Case("SGDCPR", None, KappaK(0.06), dtype="bfloat16", channels_last=True)


@examples(15, search=600)
@given(**any_stop, again=again)
@example(case=contiguous_momenta, stop=1, mmap=False, again=None)
def test_cpr_resumes_bit_identical_in_another_process(
    worker: Worker, case: Case, stop: int, mmap: bool, again: int | None
) -> None:
    check(worker, case, stop, None if again is None else max(stop, again), mmap=mmap)


@examples(8, search=60)
@given(
    baseline=st.sampled_from(list(BASELINES)),
    optimizer=st.sampled_from([name for name in TORCH if name != "lbfgs"]),
    dtype=st.sampled_from(["float32", "float64", *HALF]),
    closure=st.booleans(),
    scaler=st.booleans(),
    stop=st.integers(0, STEPS),
)
def test_baseline_resumes_bit_identical_in_another_process(
    worker: Worker, baseline: str, optimizer: str, dtype: str, closure: bool, scaler: bool, stop: int
) -> None:
    if optimizer == "nadam" or (optimizer == "sgd-fused" and dtype in HALF):
        dtype = "float32"
    scaler = scaler and dtype == "float32" and not closure
    case = Case(optimizer, baseline, dtype=dtype, closure=closure, scaler=scaler)
    check(worker, case, stop)


# Other ways to load


def trained(case: Case, steps: int = 7) -> Training:
    training = Training(case)
    training.run(0, steps)
    return training


every_way = pytest.mark.parametrize("optimizer", ["AdamCPR", "SGDCPR-unfused", "adamw"])


@every_way
def test_a_saved_state_does_not_change_with_the_training(optimizer: str) -> None:
    training = trained(Case(optimizer, adaptive=True))
    saved = training.attached.state_dict()
    whole = training.optimizer.state_dict()["cpr"]
    before = copy.deepcopy(saved)
    training.run(7)
    assert differences(saved, before) == [] == differences(whole, before)
    assert differences(training.attached.state_dict(), before) != []
    training.attached.load_state_dict(saved)
    assert differences(training.attached.state_dict(), before) == []


@every_way
def test_older_state_can_be_loaded_into_a_run(optimizer: str) -> None:
    """Load an older state into the same objects, which have sums of later parameters."""
    for bound in (KappaWS(9), KappaIP(2)):
        training = trained(Case(optimizer, None, bound))
        saved = copy.deepcopy(training.state())
        training.run(7)
        end = copy.deepcopy(training.state())
        training.load_state(copy.deepcopy(saved))
        training.run(7)
        assert differences(training.state(), end) == []
