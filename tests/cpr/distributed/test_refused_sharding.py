"""Sharded parameters that are not supported are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from nnunet_cpr import CPR, SGDCPR
from nnunet_cpr.baselines.registry import BASELINES
from tests.cpr.distributed.crew import Crew
from tests.cpr.distributed.sharded_training import Net, fsdp


def message(refused: Callable[[], Any]) -> str:
    try:
        refused()
    except (TypeError, ValueError) as error:
        return str(error)
    return "was not refused"


def first_fsdp() -> list[str]:
    device = torch.device("cpu")
    sharded = [FullyShardedDataParallel(Net(), use_orig_params=x, device_id=device) for x in (0, 1)]
    return [message(functools.partial(SGDCPR, model)) for model in sharded]


def test_flat_parameters_of_fsdp1_are_refused(two: Crew) -> None:
    for messages in two.run(first_fsdp):
        for text in messages:
            assert "flat parameter of FullyShardedDataParallel" in text
            assert "fully_shard" in text and "\n" not in text


def test_flat_parameters_of_deepspeed_are_refused() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.ds_id = 0  # as ZeRO-3 marks them
    with pytest.raises(TypeError, match=r"'w': .* flat parameter of DeepSpeed's ZeRO-3; .*fully_shard"):
        CPR([("w", p)])


def partial() -> str:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    return message(lambda: CPR([("w", p)]))


def test_partial_dtensor_is_refused(two: Crew) -> None:
    for text in two.run(partial):
        assert "'w': expected the placement Shard or Replicate, got Partial" in text


def baselines_of_shards() -> dict[str, str]:
    sharded = fsdp(Net())
    return {
        keyword: message(functools.partial(entry.build, sharded, 0.1, 10, 1))
        for keyword, entry in BASELINES.items()
    }


def test_dtensors_are_refused_by_baselines(two: Crew) -> None:
    for messages in two.run(baselines_of_shards):
        assert messages.keys() == BASELINES.keys()
        for text in messages.values():
            assert "'first.weight': expected a plain tensor, got a DTensor" in text


def test_optimizer_with_replaced_parameters_is_refused() -> None:
    # DeepSpeed's ZeRO-1 and 2 put flat float32 copies into the optimizer and write them back: what CPR
    # does to the model's parameters would be lost.
    model = Net()
    optimizer = CPR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.ones_like(flat)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(ValueError, match=r"does not have 'first.weight'.*as DeepSpeed's do"):
        optimizer.step()
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in model.parameters()]))
