"""Modular addition, on which networks first memorize and later generalize (Power et al., 2022).

This is the task of the CPR authors' grokking example and of Liu et al. (2023): a + b modulo a prime for
all pairs a <= b, with a part of the pairs for training. Without regularization the network memorizes the
training pairs and fails on the others for a long time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nnunet_cpr.vision.task import Setup, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_on, shuffled_batches

_PRIME = 59
_TRAIN_FRACTION = 0.6


class _Adder(nn.Module):
    """Two-layer network on the sum of the operands' representations.

    The representation is a linear layer instead of ``nn.Embedding``, because grokking depends on its
    norm and CPR leaves out embeddings.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.represent = nn.Linear(_PRIME, width, bias=False)
        self.hidden = nn.Linear(width, 2 * width)
        self.answer = nn.Linear(2 * width, _PRIME, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(pairs, _PRIME).to(self.answer.weight.dtype)  # [N, 2, prime]
        return self.answer(torch.relu(self.hidden(self.represent(one_hot).sum(1))))


def _setup(data: Path | None, device: torch.device) -> Setup:
    # Only a <= b: the network adds the representations, so a + b and b + a are the same input.
    pairs = torch.combinations(torch.arange(_PRIME), with_replacement=True)
    answers = pairs.sum(1) % _PRIME
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    size = int(_TRAIN_FRACTION * len(pairs))
    train, test = order[:size], order[size:]
    on_train = accuracy_on((pairs[train], answers[train]))
    on_test = accuracy_on((pairs[test], answers[test]))
    return Setup(
        model=_Adder(),
        batches=shuffled_batches((pairs[train], answers[train]), size),  # full batch
        evaluate=lambda model: on_test(model) | {"train_accuracy": on_train(model)["accuracy"]},
    )


GROKKING = Task(
    name="grokking",
    setup=_setup,
    steps=1500,
    warmup=10,
    lr={"adam": 3e-3, "sgd": 0.1, "muon": 3e-3, "amos": 3e-3},
    betas=(0.9, 0.98),
    final_lr=1.0,
    epochs_between=25,
)
