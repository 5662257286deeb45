"""Optimizers of timm by name, with and without CPR."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from nnunet_cpr import CPR
from nnunet_cpr.cpr.attachment import attached_method
from nnunet_cpr.integrations import from_timm
from nnunet_cpr.names import WrongName
from nnunet_cpr.names.run_name import parse_run_name
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.vision.optimizer import build_optimizer
from nnunet_cpr.vision.tasks import TASKS
from tests.helpers.matrices import set_gradients

NAMES = from_timm.list_names()
COMPILED = ("kron", "kronc", "kronw")  # compile, and draw from torch's global generator in a step
STEPS = 12


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 6, 3), nn.Conv3d(6, 2, 1)
        )


def build(model: nn.Module, name: str, has_cpr: bool) -> torch.optim.Optimizer:
    lr = min(0.01, from_timm.default_lr(name))  # LARS: 1
    if not has_cpr:
        return from_timm.build(model.parameters(), name, lr, 1e-4)
    return CPR(model, kappa="ws3").attach(from_timm.build(model.parameters(), name, lr))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, is_seeded: bool = False
) -> None:
    for step in steps:
        set_gradients(model.parameters(), step)
        if is_seeded:
            torch.manual_seed(step)  # as trainers with _seed<N> do in each epoch
        optimizer.step()


def check_resume(name: str, has_cpr: bool, is_seeded: bool = False) -> None:
    whole, model = Net(), Net()
    train(whole, build(whole, name, has_cpr), range(STEPS), is_seeded)
    assert all(p.isfinite().all() for p in whole.parameters())
    assert not all(torch.equal(p, q) for p, q in zip(whole.parameters(), model.parameters()))
    optimizer = build(model, name, has_cpr)
    train(model, optimizer, range(STEPS // 2), is_seeded)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(model)
    optimizer = build(resumed, name, has_cpr)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, optimizer, range(STEPS // 2, STEPS), is_seeded)
    for p, q in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPILED])
def test_each_optimizer_resumes_or_is_refused(name: str) -> None:
    if from_timm.refusal(name):
        with pytest.raises(ValueError, match=f"^{name} of timm cannot train here: "):
            from_timm.check(name)
        return
    for has_cpr in (False, True):
        check_resume(name, has_cpr)


@pytest.mark.release
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_optimizer_resumes_with_a_seed(name: str) -> None:
    for has_cpr in (False, True):
        check_resume(name, has_cpr, is_seeded=True)


def test_state_names_its_writer_and_is_taken_by_no_other_optimizer() -> None:
    lion, adopt = (build(Net(), name, has_cpr=False) for name in ("lion", "adopt"))
    assert lion.state_dict()["param_groups"][0]["timm"].startswith("lion, timm ")
    for other in (adopt, torch.optim.AdamW(Net().parameters())):
        with pytest.raises(ValueError, match=r"expected that of lion, timm .*, got that of a"):
            lion.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nnUNetTrainerTimm", "names no optimizer of timm; write it first, as nnUNetTrainerTimm_lion"),
        ("nnUNetTrainerTimm_lyon", "timm has no optimizer 'lyon'; did you mean lion"),
        ("nnUNetTrainerTimm_bnblion", "it needs the package bitsandbytes"),
        ("nnUNetTrainerTimm_lion_momentum0p9", "lion of timm takes no momentum"),
    ],
)
def test_wrong_name_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(WrongName, match=message) as caught:
        parse_trainer_name(name)
    assert "\n" not in str(caught.value)


def test_vision_runs_take_the_same_names() -> None:
    model = nn.Linear(3, 3)
    for name, has_cpr in (("Timm_lion_wd0p1", False), ("TimmCPR_lion_ws60", True)):
        run = TASKS["digits"].complete(parse_run_name(name))
        optimizer = build_optimizer(model, run, TASKS["digits"])
        assert type(optimizer).__name__ == "Lion" and (attached_method(optimizer) is not None) == has_cpr
        assert optimizer.param_groups[0]["lr"] == 1e-4
        assert optimizer.param_groups[0]["weight_decay"] == (0.0 if has_cpr else 0.1)
