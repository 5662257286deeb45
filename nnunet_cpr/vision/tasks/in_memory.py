"""Classification of data that is held in memory as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from nnunet_cpr._device import to_device

Pairs = tuple[Tensor, Tensor]
"""Inputs ``[N, ...]`` and class labels ``[N]``."""


def shuffled_batches(data: Pairs, size: int) -> Callable[[int], Iterator[Pairs]]:
    """Return an epoch function with a random order for each epoch; an incomplete batch is dropped.

    Example:
        >>> epoch = shuffled_batches((torch.arange(5), torch.arange(5)), size=2)
        >>> [len(labels) for _, labels in epoch(0)]
        [2, 2]
    """
    inputs, labels = data

    def epoch(number: int) -> Iterator[Pairs]:
        # Drawn on the CPU, so that the order does not depend on the device.
        order = to_device(torch.randperm(len(labels)).tolist(), torch.int64, labels.device)
        for start in range(0, len(labels) - size + 1, size):
            indices = order[start : start + size]
            yield inputs[indices], labels[indices]

    return epoch


def cross_entropy(model: nn.Module, batch: Pairs) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def accuracy_of(data: Pairs, size: int = 1024) -> Callable[[nn.Module], dict[str, float]]:
    """Return a function that computes ``accuracy`` in percent and ``loss`` of a model on ``data``."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        correct, losses = [], []  # stay on the device, so that no chunk waits for the one before
        for inputs, labels in zip(*(tensor.split(size) for tensor in data)):
            labels = labels.to(device)
            logits = model(inputs.to(device)).float()
            correct.append((logits.argmax(1) == labels).sum())
            losses.append(functional.cross_entropy(logits, labels, reduction="sum"))
        count, loss = sum(torch.stack(correct).tolist()), sum(torch.stack(losses).tolist())
        return {"accuracy": 100 * count / len(data[1]), "loss": loss / len(data[1])}

    return evaluate
