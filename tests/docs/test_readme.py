"""The README's own example."""

from __future__ import annotations

import re

import pytest
import torch
from torchvision.models import resnet18

from tests.helpers import ROOT


@pytest.mark.parametrize("side", "-+")
def test_both_sides_of_the_difference_train_a_network(side: str) -> None:
    found = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found is not None
    lines = [line[1:] for line in found[1].splitlines() if line[0] in (side, " ")]
    model = resnet18(num_classes=10)
    names = {"model": model}
    exec("\n".join(lines), names)
    optimizer = names["optimizer"]
    assert isinstance(optimizer, torch.optim.Adam)
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert hasattr(optimizer, "cpr") == (side == "+")
