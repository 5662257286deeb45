"""Next byte of a text: the paper's question about GPT-2, does CPR need fewer steps, in small."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nnunet_cpr.refusals import Refusal
from nnunet_cpr.vision.task import Metrics, Pairs, Setup, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_on

_BYTES = 256
_CONTEXT = 64
_BATCH = 32
_WIDTH, _LAYERS, _HEADS = 96, 3, 4
_HELD_OUT = 0.05
"""Share of the text for the validation; as much at its end is for the test."""
_EVALUATED = 1024
"""Largest number of windows of an evaluation."""
_STEPS_OF_EPOCH = 50


class _Transformer(nn.Module):
    """Causal transformer with normalization before each block, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, _WIDTH)
        self.positions = nn.Embedding(_CONTEXT, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, _LAYERS, norm=nn.LayerNorm(_WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(_WIDTH, _BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits ``[N, 256, L]`` of the bytes that follow those of ``text``, ``[N, L]``."""
        length = text.shape[1]
        x = self.bytes(text) + self.positions(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.blocks(x, mask=mask, is_causal=True)).mT


def _setup(data: Path | None, device: torch.device) -> Setup:
    if data is None:
        raise Refusal("--data is missing: name a folder with a text in .txt files")
    text = _read(data)
    held_out = int(_HELD_OUT * len(text))
    if held_out <= _CONTEXT:
        least = math.ceil((_CONTEXT + 1) / _HELD_OUT)
        raise Refusal(f"{data}: expected at least {least} bytes of text, got {len(text)}")
    train, validation, test = text.split([len(text) - 2 * held_out, held_out, held_out])
    on_validation, on_test = (accuracy_on(_windows(part), size=128) for part in (validation, test))

    def evaluate(model: nn.Module) -> Metrics:
        numbers = on_validation(model)
        return {**on_test(model), **{f"validation_{key}": value for key, value in numbers.items()}}

    return Setup(_Transformer(), _random_windows(train), evaluate)


@functools.lru_cache(maxsize=2)  # the runs of a sweep share the text
def _read(folder: Path) -> Tensor:
    """Return the bytes of all .txt files below a folder, in the order of their paths, int64 ``[N]``."""
    files = sorted(path for path in folder.rglob("*.txt") if not path.name.startswith("."))
    if not files:
        raise Refusal(f"{folder}: expected .txt files, got none")
    text = b"".join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def _windows(text: Tensor) -> Pairs:
    """Return evenly spaced windows of a text and the bytes that follow theirs, ``[N, L]`` each."""
    windows = text.unfold(0, _CONTEXT + 1, _CONTEXT)
    windows = windows[:: -(-len(windows) // _EVALUATED)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _random_windows(text: Tensor) -> Callable[[], Iterator[Pairs]]:
    """Return a function that yields batches of windows at random places."""
    offsets = torch.arange(_CONTEXT + 1)

    def batches() -> Iterator[Pairs]:
        for _ in range(_STEPS_OF_EPOCH):
            starts = torch.randint(len(text) - _CONTEXT, (_BATCH, 1))
            windows = text[starts + offsets]
            yield windows[:, :-1], windows[:, 1:]

    return batches


TEXT = Task(
    name="text",
    setup=_setup,
    steps=800,
    warmup=80,
    lr={"adam": 3e-3, "sgd": 0.1, "muon": 1e-2},
    betas=(0.9, 0.95),
    final_lr=0.1,
    weight_decay={"adam": 0.1, "muon": 0.1},
    clip=1.0,
    epochs_between=4,
)
