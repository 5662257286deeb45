"""Classification of data that fits into memory as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Pairs = tuple[Tensor, Tensor]
"""Inputs ``[N, ...]`` and class labels ``[N]``."""


def shuffled_batches(data: Pairs, size: int) -> Callable[[int], Iterator[Pairs]]:
    """Batches in an order that is drawn for every epoch; the last incomplete one is left out."""
    inputs, labels = data

    def epoch(number: int) -> Iterator[Pairs]:
        order = torch.randperm(len(labels))
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
        right, loss = 0, 0.0
        for inputs, labels in zip(*(tensor.split(size) for tensor in data)):
            labels = labels.to(device)
            logits = model(inputs.to(device)).float()
            right += int((logits.argmax(1) == labels).sum())
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": 100 * right / len(data[1]), "loss": loss / len(data[1])}

    return evaluate
