"""AMOS from pytorch-optimizer with additional decay on the matrices."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from pytorch_optimizer import Amos

from nnunet_cpr.baselines import DecoupledDecay, amos
from tests.helpers.matrices import set_gradients


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))


def test_it_trains_a_small_model() -> None:
    model = small_model()
    optimizer = amos(model, lr=0.03, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    y = x.argmax(1) % 3
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_additional_decay_applies_to_matrices_only() -> None:
    plain, decayed = small_model(), small_model()
    for model, weight_decay in ((plain, 0.0), (decayed, 0.5)):
        optimizer = amos(model, lr=0.1, weight_decay=weight_decay)
        assert ("baseline" in optimizer.state_dict()) == (weight_decay > 0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for name, p in small_model().named_parameters():
        assert torch.equal(plain.get_parameter(name), p)
        shrunk = p * (1 - 0.1 * 0.5) if name in ("0.weight", "2.weight") else p
        torch.testing.assert_close(decayed.get_parameter(name), shrunk)


def test_amos_without_decay_equals_the_package() -> None:
    ours, theirs = small_model(), small_model()
    optimizers = amos(ours, lr=0.01), Amos(theirs.parameters(), lr=0.01)
    for t in range(10):
        for model, optimizer in zip((ours, theirs), optimizers):
            set_gradients(model.parameters(), t)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "give",
    [
        lambda m: m.parameters(),
        lambda m: m.named_parameters(),
        lambda m: list(m.parameters()),
        lambda m: iter([{"params": m.parameters(), "lr": 0.02, "weight_decay": 0.1}]),
    ],
    ids=["parameters", "named", "list", "groups"],
)
def test_parameters_may_come_in_every_way(give) -> None:
    model = small_model()
    optimizer = amos(give(model), lr=0.02, weight_decay=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    assert {group["lr"] for group in optimizer.param_groups} == {0.02}
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_groups_keep_their_learning_rates() -> None:
    model = small_model()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    assert [group["lr"] for group in amos(groups, lr=0.1).param_groups] == [0.5, 0.1]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_resumed_run_is_bit_identical(weight_decay: float) -> None:
    def run(model, optimizer, steps) -> None:
        for t in steps:
            set_gradients(model.parameters(), t)
            optimizer.step()

    model = small_model()
    optimizer = amos(model, 0.01, weight_decay)
    run(model, optimizer, range(5))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    run(model, optimizer, range(5, 10))

    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    resumed = torch.nn.Sequential(*small_model())
    other = amos(resumed, 0.01, weight_decay)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    run(resumed, other, range(5, 10))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    if weight_decay:
        with pytest.raises(ValueError, match=r"weight_decay: expected 0\.2, got 0\.1"):
            amos(small_model(), 0.01, 0.2).load_state_dict(checkpoint["optimizer"])


def test_nothing_else_can_be_attached_beside_its_decay() -> None:
    model = small_model()
    with pytest.raises(RuntimeError, match="another DecoupledDecay"):
        DecoupledDecay(model).attach(amos(model, weight_decay=0.1))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ImportError, match=r"pip install 'nnunet-cpr\[baselines\]'") as error:
        amos(small_model())
    assert "\n" not in str(error.value)
