"""Hugging Face's Trainer, which uses Accelerate, against plain torch loops."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from tests.helpers.resume_cases import assert_regularized, differences

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nnunet_cpr import SGDCPR, AdamCPR  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

STEPS, ACCUMULATE = 8, 2


def language_model() -> nn.Module:
    """Return a GPT-2 of one layer without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **tokens)).train()


def texts(count: int = 2 * STEPS * ACCUMULATE) -> list[dict[str, Tensor]]:
    """Return rows of eight tokens; the first is no target, for equal counts in all versions."""
    tokens = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:, 0] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return transformers.get_linear_schedule_with_warmup(optimizer, 0, STEPS)


def trained_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, limit: float, bf16: bool
) -> dict[str, Any]:
    schedule = linear_decay(optimizer)
    rows = texts()
    size = 2 * ACCUMULATE
    for step in range(STEPS):
        chosen = rows[step * size : (step + 1) * size]
        targets = sum((row["labels"] != -100).sum() for row in chosen)
        for part in range(ACCUMULATE):
            pair = chosen[2 * part : 2 * part + 2]
            batch = {key: torch.stack([row[key] for row in pair]) for key in pair[0]}
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = model(**batch, num_items_in_batch=targets).loss
            loss.backward()
        if limit:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("build", "bf16", "limit"), [(AdamCPR, True, 0.5), (SGDCPR, False, 0.0)], ids=["Adam", "SGD"]
)
def test_trainer_equals_plain_loop(build: Any, bf16: bool, limit: float, tmp_path: Path) -> None:
    settings = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=STEPS,
        max_grad_norm=limit,
        bf16=bf16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model, twin = language_model(), language_model()
    optimizer = build(model, lr=0.02, kappa="ws2")
    pair = optimizer, linear_decay(optimizer)
    InOrder(model, settings, train_dataset=texts(), optimizers=pair).train()
    found = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = trained_plainly(twin, build(twin, lr=0.02, kappa="ws2"), limit, bf16)
    assert differences(found, expected) == []
    assert_regularized(found["optimizer"], STEPS)
