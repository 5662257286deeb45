"""DDP and ZeroRedundancyOptimizer: all processes have the same state of CPR bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from nnunet_cpr import CPR
from tests.cpr.distributed.crew import Crew
from tests.cpr.distributed.sharded_training import (
    Method,
    Net,
    agree,
    alone,
    found,
    part_of_the_batch,
    train,
)
from tests.helpers.resume_cases import differences

STEPS, SAVED = 8, 4


def zero_redundancy(replica: DistributedDataParallel) -> tuple[ZeroRedundancyOptimizer, CPR]:
    """Train with Adam's moments distributed over the processes."""
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.Adam, lr=0.02)
    cpr = CPR(replica, kappa="ws2")
    cpr.attach(optimizer)
    return optimizer, cpr


def saved_and_loaded(
    build: Callable[[DistributedDataParallel], tuple[torch.optim.Optimizer, CPR]], file: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with a save on the first process, then again from the checkpoint."""
    model = Net()
    replica = DistributedDataParallel(model)
    optimizer, cpr = build(replica)
    assert "first.weight" in cpr.names
    place = part_of_the_batch("ddp")
    train(replica, optimizer, range(SAVED), *place)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(replica, optimizer, range(SAVED, STEPS), *place)
    through = found(model, cpr)

    dist.barrier()
    saved = torch.load(file, weights_only=True)
    model = Net()
    model.load_state_dict(saved["model"])
    replica = DistributedDataParallel(model)
    optimizer, cpr = build(replica)
    optimizer.load_state_dict(saved["optimizer"])
    train(replica, optimizer, range(SAVED, STEPS), *place)
    return through, found(model, cpr)


METHODS = [Method("SGDCPR"), Method("AdamCPR", "std", "ip1"), Method("MuonCPR")]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_ddp_processes_stay_bit_identical(two: Crew, tmp_path: Path, method: Method) -> None:
    results = two.run(saved_and_loaded, method.build, str(tmp_path / "checkpoint.pt"))
    first = results[0][0]
    agree(first, alone(method, STEPS))
    for through, again in results:
        assert differences(through, first) == [] == differences(again, first)


def test_zero_redundancy_optimizer(two: Crew, tmp_path: Path) -> None:
    expected = alone(Method("Adam"), STEPS)
    results = two.run(saved_and_loaded, zero_redundancy, str(tmp_path / "checkpoint.pt"))
    for through, again in results:
        agree(through, expected)
        assert differences(through, results[0][0]) == [] == differences(again, through)
