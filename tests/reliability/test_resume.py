"""Trainings resumed in another process equal uninterrupted ones bit for bit."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st

from nnunet_cpr.fused import cpu
from tests.helpers.examples import examples
from tests.helpers.resume_cases import (
    BASELINES,
    CHUNK,
    OURS,
    STEPS,
    TORCH,
    Case,
    Training,
    differences,
)


@pytest.fixture(autouse=True)
def _like_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK", CHUNK)


def environment() -> dict[str, str]:
    """Return the environment of a process with the same import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Worker:
    """Worker process that resumes trainings."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.result = folder / "checkpoint.pt", folder / "result.pt"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.resume_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def go_on(
        self, case: Case, begin: int, again_at: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the final state of a training resumed from before step ``begin``."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {
            "case": asdict(case),
            "begin": begin,
            "again_at": again_at,
            "options": options,
            "checkpoint": str(self.checkpoint),
            "result": str(self.result),
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer == "\n", answer
        return torch.load(self.result, weights_only=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("worker"))
    yield worker
    worker.end()


BOUNDS = st.one_of(
    st.tuples(st.just("KappaK"), st.fixed_dictionaries({"value": st.floats(1e-3, 0.1)})),
    st.tuples(st.just("KappaKI0"), st.fixed_dictionaries({"factor": st.floats(0.5, 1.5)})),
    st.tuples(st.just("KappaWS"), st.fixed_dictionaries({"steps": st.integers(1, STEPS + 2)})),
    st.tuples(
        st.just("KappaIP"),
        st.fixed_dictionaries({"interval": st.integers(1, 4), "ema": st.sampled_from([0.0, 0.5, 0.9])}),
    ),
)
HALF = ("bfloat16", "float16")


@st.composite
def cases(draw: st.DrawFn, optimizers: tuple[str, ...] = (*OURS, *TORCH)) -> Case:
    optimizer = draw(st.sampled_from(optimizers))
    bound, bound_settings = draw(BOUNDS)
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
        bound=bound,
        bound_settings=bound_settings,
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
    if hypothesis.currently_in_test_context():
        _tell(training, stop)
    training.save(worker.checkpoint)
    training.run(stop)
    resumed = worker.go_on(case, stop, again_at, **options)
    assert differences(training.state(), resumed) == []


def _tell(training: Training, stop: int) -> None:
    """Record the state at the stop for ``--hypothesis-show-statistics``."""
    case, state = training.case, training.attached._state
    event(f"optimizer: {case.optimizer}")
    event(f"dtype: {case.dtype}")
    if "kappa" in state:
        bounded = state["kappa"].isfinite()
        found = "all" if bounded.all() else "some" if bounded.any() else "none"
        event(f"{case.bound}, bounds set: {found}")
        event(
            f"{case.regularizer}, multipliers positive: {bool((state['lagrange_multiplier'] > 0).any())}"
        )
    if "last_difference" in state:
        searching = state["last_difference"].isfinite() & state["kappa"].isinf()
        event(f"in the middle of an inflection search: {bool(searching.any())}")
    if stop and "skipped_updates" in state:
        event(f"has skipped updates: {bool(state['skipped_updates'] > 0)}")


any_stop = {"case": cases(), "stop": st.integers(0, STEPS), "mmap": st.booleans()}
again = st.none() | st.integers(0, STEPS)

# Momenta whose strides are not the parameter's, in half precision, which rounds by strides.
contiguous_momenta = Case(
    "SGDCPR", None, "KappaK", {"value": 0.06}, dtype="bfloat16", channels_last=True
)


@examples(25, search=600)
@given(**any_stop, again=again)
@example(case=contiguous_momenta, stop=1, mmap=False, again=None)
def test_cpr_resumes_bit_identical_in_another_process(
    worker: Worker, case: Case, stop: int, mmap: bool, again: int | None
) -> None:
    check(worker, case, stop, None if again is None else max(stop, again), mmap=mmap)


@examples(12, search=60)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a GPU is")
@pytest.mark.parametrize(
    ("optimizer", "dtype", "bound", "settings", "stop"),
    [
        ("SGDCPR", "bfloat16", "KappaIP", {"interval": 2, "ema": 0.5}, 5),
        pytest.param("AdamCPR", "float32", "KappaWS", {"steps": 3}, 2, marks=pytest.mark.slow),
        pytest.param("AdamCPR", "float16", "KappaKI0", {"factor": 0.9}, 9, marks=pytest.mark.slow),
    ],
)
def test_triton_step_resumes_bit_identical_in_another_process(
    worker: Worker, optimizer: str, dtype: str, bound: str, settings: dict, stop: int
) -> None:
    pytest.importorskip("triton", minversion="3.3")
    case = Case(optimizer, None, bound, settings, dtype=dtype, backend="triton")
    check(worker, case, stop)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGDCPR", "AdamCPR", "adamw"])
def test_fresh_process_resumes_bit_identical(optimizer: str, tmp_path: Path) -> None:
    fresh = Worker(tmp_path)
    case = Case(optimizer, bound="KappaIP", bound_settings={"interval": 2, "ema": 0.5}, adaptive=True)
    check(fresh, case, stop=5)
    fresh.end()


# Other ways to load


def trained(case: Case, steps: int = 7) -> Training:
    training = Training(case)
    training.run(0, steps)
    return training


every_way = pytest.mark.parametrize(
    "optimizer", ["SGDCPR", "AdamCPR", "AdamCPR-unfused", "adamw", "sgd"]
)


@every_way
def test_a_saved_state_does_not_change_with_the_training(optimizer: str) -> None:
    training = trained(Case(optimizer, adaptive=True))
    saved = training.attached.state_dict()
    whole = training.optimizer.state_dict()["cpr"]
    before = copy.deepcopy(saved)
    training.run(7)
    assert differences(saved, before) == [] == differences(whole, before)
    assert differences(training.attached.state_dict(), before) != []


@every_way
def test_older_state_can_be_loaded_into_a_run(optimizer: str) -> None:
    """Load an older state into the same objects, which have sums of later parameters."""
    for bound, bound_settings in (("KappaWS", {"steps": 9}), ("KappaIP", {"interval": 2})):
        training = trained(Case(optimizer, None, bound, bound_settings))
        saved = training.snapshot()
        training.run(7)
        end = training.snapshot()
        training.load_state(copy.deepcopy(saved))
        training.run(7)
        assert differences(training.state(), end) == []


@pytest.mark.parametrize("optimizer", list(OURS))
def test_cpr_optimizers_do_not_change_a_loaded_state(optimizer: str) -> None:
    """A state can be loaded twice; torch's optimizers keep its tensors."""
    training = trained(Case(optimizer))
    saved = training.snapshot()
    before = copy.deepcopy(saved)
    ends = []
    for _ in range(2):
        training.load_state(saved)
        training.run(7)
        ends.append(training.snapshot())
    assert differences(saved, before) == [] == differences(*ends)


@pytest.mark.slow
def test_checkpoint_read_with_mmap_can_be_overwritten(tmp_path: Path) -> None:
    """A state that remains in the file would cause a bus error."""
    code = """
import sys
from pathlib import Path
from tests.helpers.resume_cases import Case, Training
path = Path(sys.argv[1])
for optimizer in ("SGDCPR", "AdamCPR"):
    training = Training(Case(optimizer))
    training.run(0, 5)
    training.save(path)
    training.load(path, mmap=True)
    path.write_bytes(b"")
    training.run(5)
    training.save(path)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "checkpoint.pt")]
    subprocess.run(command, env=environment(), check=True)


@every_way
def test_map_location_may_be_given(optimizer: str, tmp_path: Path) -> None:
    training = trained(Case(optimizer))
    training.save(tmp_path / "checkpoint.pt")
    training.run(7)
    for where in ("cpu", torch.device("cpu"), lambda storage, location: storage):
        resumed = Training(training.case, seed=5)
        resumed.load(tmp_path / "checkpoint.pt", map_location=where)
        resumed.run(7)
        assert differences(resumed.state(), training.state()) == []


def test_channels_last_may_change_on_resuming() -> None:
    """Other strides change rounding only."""
    for optimizer in ("SGDCPR", "AdamCPR", "SGDCPR-unfused", "adamw"):
        for before, after in ((False, True), (True, False)):
            training = trained(Case(optimizer, channels_last=before))
            other = Training(Case(optimizer, channels_last=after), seed=5)
            other.load_state(training.snapshot())
            for each in (training, other):
                each.run(7)
            assert_close(training, other)


def test_another_backend_resumes_a_checkpoint() -> None:
    for optimizer in ("SGDCPR", "AdamCPR", "AdamCPR-amsgrad"):
        for before, after in (("plain", "chosen"), ("chosen", "plain")):
            training = trained(Case(optimizer, backend=before))
            other = Training(Case(optimizer, backend=after), seed=5)
            other.load_state(training.snapshot())
            for each in (training, other):
                each.run(7)
            assert (training.optimizer._backend is None) != (other.optimizer._backend is None)
            assert_close(training, other)


def assert_close(one: Training, other: Training) -> None:
    for p, q in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    mine, theirs = one.attached._state, other.attached._state
    assert mine["lagrange_multiplier"].max() > 0
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("version", [2, None])
@pytest.mark.parametrize("method", ["cpr", "awd"])
def test_other_state_version_is_refused(version: Any, method: str) -> None:
    training = trained(Case("adamw", None if method == "cpr" else method), 2)
    state = {**training.attached.state_dict(), "version": version}
    with pytest.raises(ValueError, match=f"expected version 1, got {version!r}$"):
        training.attached.load_state_dict(state)


def test_rescaling_without_initial_norm_can_be_resumed() -> None:
    """It has no norm to rescale to, and no number that loading refuses."""
    training = Training(Case("sgd", "rescale"))
    with torch.no_grad():
        training.model[4].weight.fill_(torch.inf)
    training.run(0, 2)
    Training(training.case).load_state(training.snapshot())
