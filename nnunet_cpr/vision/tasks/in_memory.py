"""Classification of data that is held in memory as one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from nnunet_cpr.cpr.tensors import to_device
from nnunet_cpr.vision.task import Metrics, Pairs


def shuffled_batches(data: Pairs, size: int) -> Callable[[], Iterator[Pairs]]:
    """Return a function that yields batches in random order, without an incomplete last one.

    Example:
        >>> batches = shuffled_batches((torch.arange(5), torch.arange(5)), size=2)
        >>> [len(labels) for _, labels in batches()]
        [2, 2]
    """
    inputs, labels = data

    def batches() -> Iterator[Pairs]:
        # Drawn on the CPU, so that the order does not depend on the device.
        order = to_device(torch.randperm(len(labels)).tolist(), torch.int64, labels.device)
        for start in range(0, len(labels) - size + 1, size):
            indices = order[start : start + size]
            yield inputs[indices], labels[indices]

    return batches


def cropped_batches(
    data: Pairs, size: int, padding: int, normalize: Callable[[Tensor], Tensor]
) -> Callable[[], Iterator[Pairs]]:
    """Return a function that yields batches of random crops of the padded images, half of them mirrored.

    A batch is cropped at once on the device, which holds all images, so that no worker processes are
    needed. Random numbers are drawn on the CPU, so that they do not depend on the device.

    Args:
        data: images, uint8 ``[N, H, W, 3]``, and labels.
        size: batch size.
        padding: number of black pixels around an image.
        normalize: function that turns crops into inputs.
    """
    images, labels = data
    around = (0, 0, padding, padding, padding, padding)
    padded_batches = shuffled_batches((nn.functional.pad(images, around), labels), size)

    def batches() -> Iterator[Pairs]:
        for padded, batch_labels in padded_batches():
            yield normalize(crop(padded, padding)), batch_labels

    return batches


def crop(padded: Tensor, padding: int) -> Tensor:
    """Return a random crop of each padded image ``[N, H, W, 3]``, mirrored with probability 0.5."""
    count, height, width, _ = padded.shape
    offsets = 2 * padding + 1
    top, left = torch.randint(offsets, (2, count, 1))
    mirrored = torch.rand(count, 1) < 0.5
    drawn = torch.cat((top, left, mirrored), 1).flatten().tolist()
    top, left, mirrored = to_device(drawn, torch.int64, padded.device).view(count, 3, 1).unbind(1)
    rows = top + torch.arange(height - offsets + 1, device=padded.device)  # [N, height of the crop]
    columns = left + torch.arange(width - offsets + 1, device=padded.device)
    columns = torch.where(mirrored > 0, columns.flip(1), columns)
    image = torch.arange(count, device=padded.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return uint8 ``[N, H, W, 3]`` as float32 ``[N, 3, H, W]`` with mean 0 and standard deviation 1.

    Args:
        images: the images.
        mean, std: those of each channel over the training images, scaled to [0, 1].
    """
    scaled = (images.float() / 255 - _constant(mean, images.device)) / _constant(std, images.device)
    return scaled.permute(0, 3, 1, 2).contiguous()


@functools.cache  # a copy to a GPU in every batch would wait for it
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def accuracy_on(
    data: Pairs, size: int = 1024, normalize: Callable[[Tensor], Tensor] = lambda inputs: inputs
) -> Callable[[nn.Module], Metrics]:
    """Return a function that computes ``accuracy`` in percent and ``loss`` of a model on ``data``.

    Both are means over all labels, of which an input may have several.

    Args:
        data: inputs and labels.
        size: batch size.
        normalize: function to apply to the inputs of a batch.
    """

    def evaluate(model: nn.Module) -> Metrics:
        device = next(model.parameters()).device
        correct, losses = [], []  # stay on the device, so that no chunk waits for the one before
        for inputs, labels in zip(*(tensor.split(size) for tensor in data)):
            labels = labels.to(device)
            logits = model(normalize(inputs.to(device)))
            correct.append((logits.argmax(1) == labels).sum())
            losses.append(functional.cross_entropy(logits, labels, reduction="sum"))
        count, loss = sum(torch.stack(correct).tolist()), sum(torch.stack(losses).tolist())
        return {"accuracy": 100 * count / data[1].numel(), "loss": loss / data[1].numel()}

    return evaluate
