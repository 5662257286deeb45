"""Classification of data that fits into memory as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from nnunet_cpr._device import to_device

Pairs = tuple[Tensor, Tensor]
"""Inputs ``[N, ...]`` and class labels ``[N]``."""


def shuffled_batches(data: Pairs, size: int) -> Callable[[int], Iterator[Pairs]]:
    """Batches in an order that is drawn for every epoch; the last incomplete one is left out."""
    inputs, labels = data

    def epoch(number: int) -> Iterator[Pairs]:
        # Drawn by the CPU's generator, whatever the device, and copied once an epoch.
        order = to_device(torch.randperm(len(labels)).tolist(), torch.int64, labels.device)
        for first in range(0, len(labels) - size + 1, size):
            chosen = order[first : first + size]
            yield inputs[chosen], labels[chosen]

    return epoch


def cross_entropy(model: nn.Module, batch: Pairs) -> Tensor:
    """The loss of a batch."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def accuracy_of(data: Pairs, size: int = 1024) -> Callable[[nn.Module], dict[str, float]]:
    """An evaluation on all of ``data``: ``accuracy`` in percent, and ``loss``."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        right, losses = [], []  # of the parts, on the device until all are on their way
        for inputs, labels in zip(*(tensor.split(size) for tensor in data)):
            labels = labels.to(device)
            logits = model(inputs.to(device)).float()
            right.append((logits.argmax(1) == labels).sum())
            losses.append(functional.cross_entropy(logits, labels, reduction="sum"))
        count, loss = sum(torch.stack(right).tolist()), sum(torch.stack(losses).tolist())
        return {"accuracy": 100 * count / len(data[1]), "loss": loss / len(data[1])}

    return evaluate
