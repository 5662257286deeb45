"""Modular addition, which networks learn by heart first and understand later (Power et al., 2022).

The task of the CPR authors' grokking example and of Liu et al. (2023): a + b modulo a prime, for all
pairs a <= b, of which a part is trained on. Without regularization the network knows the training pairs
and fails on the others for very long.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nnunet_cpr.vision.task import Options, Prepared, Task
from nnunet_cpr.vision.tasks.in_memory import accuracy_of, cross_entropy, shuffled_batches

_PRIME = 59
_TRAIN_FRACTION = 0.6


class _Adder(nn.Module):
    """Both operands through one matrix, their sum through two layers.

    A matrix and no ``nn.Embedding``: the norm of the representation is what grokking is about, so it
    has to be regularized.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.represent = nn.Linear(_PRIME, width, bias=False)
        self.hidden = nn.Linear(width, 2 * width)
        self.answer = nn.Linear(2 * width, _PRIME, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(pairs, _PRIME).to(self.answer.weight.dtype)  # [N, 2, prime]
        return self.answer(torch.relu(self.hidden(self.represent(one_hot).sum(1))))


def _prepare(options: Options) -> Prepared:
    # The network adds what it sees, so b + a would be no new question after a + b.
    pairs = torch.combinations(torch.arange(_PRIME), with_replacement=True)
    answers = pairs.sum(1) % _PRIME
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    size = int(_TRAIN_FRACTION * len(pairs))
    train, test = order[:size], order[size:]
    trained_on = accuracy_of((pairs[train], answers[train]))
    unseen = accuracy_of((pairs[test], answers[test]))
    return Prepared(
        model=_Adder(),
        epoch=shuffled_batches((pairs[train], answers[train]), size),  # all at once
        loss=cross_entropy,
        evaluate=lambda model: {
            **unseen(model),
            "train_accuracy": trained_on(model)["accuracy"],
        },
    )


GROKKING = Task(
    name="grokking",
    about="addition modulo 59 of pairs that were not trained on; a few minutes on a CPU",
    prepare=_prepare,
    steps=1500,
    warmup=10,
    lr={"adam": 3e-3, "sgd": 0.1, "amos": 3e-3},
    betas=(0.9, 0.98),
    final_lr=1.0,
    epochs_between=25,
    seeds=(1, 2),
)
