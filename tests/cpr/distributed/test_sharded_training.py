"""FSDP2 and tensor parallelism: results of one process with one all-reduce per step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nnunet_cpr import AdamCPR
from tests.cpr.distributed.crew import Crew
from tests.cpr.distributed.sharded_training import (
    Method,
    agree,
    alone,
    fused_and_unfused,
    load_sharded_and_go_on,
    save_sharded,
    together,
)
from tests.helpers.resume_cases import differences

STEPS = 8
METHODS = [
    Method("SGDCPR"),
    Method("AdamCPR", "std", "ki0x0p9", adaptive=True),
    Method("Adam", "l1", "ip1"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_fsdp2_equals_one_process(four: Crew, method: Method) -> None:
    expected = alone(method, STEPS)
    without = alone(replace(method, kappa="ws1000000"), STEPS)["parameter first.weight"]
    assert not torch.allclose(expected["parameter first.weight"], without, rtol=1e-3)
    results = four.run(together, "fsdp", method, STEPS)
    for result, all_reduces in results:
        agree(result, expected)
        assert all_reduces == STEPS
        assert differences(result, results[0][0]) == []


def test_fused_steps_of_local_tensors_equal_unfused_ones(four: Crew) -> None:
    for fused, unfused in four.run(fused_and_unfused, AdamCPR, STEPS):
        for p, q in zip(fused, unfused):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "all_reduces"),
    [("hybrid", 1), ("fsdp_and_tensor_parallel", 2)],
)
def test_other_meshes(four: Crew, way: str, all_reduces: int) -> None:
    method = Method("SGDCPR")
    expected = alone(method, STEPS)
    for result, count in four.run(together, way, method, STEPS):
        agree(result, expected)
        assert count == all_reduces * STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "before"),
    [
        (Method("SGDCPR"), 1),
        (Method("AdamCPR", kappa="ip1", adaptive=True), 4),
    ],
    ids=["before the bounds", "after"],
)
def test_sharded_checkpoint_resumes_on_any_number_of_processes(
    four: Crew, two: Crew, tmp_path: Path, method: Method, before: int
) -> None:
    expected = alone(method, STEPS)
    folder = str(tmp_path / "checkpoint")
    four.run(save_sharded, folder, method, before)
    more = range(before, STEPS)
    for members, way in ((two, "fsdp"), (four, "fsdp_and_tensor_parallel")):
        for result in members.run(load_sharded_and_go_on, folder, way, method, more):
            agree(result, expected)
    agree(load_sharded_and_go_on(folder, None, method, more), expected)
