"""Hugging Face's Trainer and Accelerate against plain torch loops, in one process and in two."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from tests.helpers.client_training import (
    METHODS,
    assert_regularized,
    assert_same,
    batches,
    case,
    clip,
    network,
    samples,
    state_of,
    train_plainly,
)
from tests.helpers.gloo_launch import run_in_two_processes

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from nnunet_cpr import SGDCPR, AdamCPR, KappaWS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

STEPS, ACCUMULATE, LIMIT, RATE = 8, 2, 0.5, 0.02
CLASSES: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamCPR": (AdamCPR, {"lr": RATE, "kappa": KappaWS(2)}),
    "SGDCPR": (SGDCPR, {"lr": RATE, "kappa": KappaWS(2)}),
}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Reset precision and accumulation, which Accelerate keeps for the process."""
    reset_accelerate()
    yield
    reset_accelerate()


def reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# The Trainer


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


def settings_for(folder: Path, **options: Any) -> Any:
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_steps": STEPS,
        "max_grad_norm": LIMIT,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(str(folder), **defaults | options)


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return transformers.get_linear_schedule_with_warmup(optimizer, 0, STEPS)


def trainer_by_optimizers(
    method: str, settings: Any, dtype: torch.dtype = torch.float32
) -> transformers.Trainer:
    model = language_model().to(dtype)
    optimizer = METHODS[method](model)
    pair = optimizer, linear_decay(optimizer)
    return InOrder(model, settings, train_dataset=texts(), optimizers=pair)


def trainer_by_class(kind: str, settings: Any) -> transformers.Trainer:
    cls, options = CLASSES[kind]
    return InOrder(
        language_model(),
        settings,
        train_dataset=texts(),
        optimizer_cls_and_kwargs=(cls, dict(options)),
    )


def trained(trainer: transformers.Trainer, **options: Any) -> dict[str, Any]:
    trainer.train(**options)
    return state_of(trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer.optimizer)


def trained_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, limit: float = LIMIT, bf16: bool = False
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
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("method", "bf16", "limit"),
    [
        case(m, bf16, limit, is_slow=m == "AdamW with CPR" or not (bf16 and limit))
        for m in METHODS
        for bf16 in (False, True)
        for limit in (0.0, LIMIT)
    ],
)
def test_trainer_equals_plain_loop(method: str, bf16: bool, limit: float, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, max_grad_norm=limit, bf16=bf16)
    found = trained(trainer_by_optimizers(method, settings))
    model = language_model()
    assert_same(found, trained_plainly(model, METHODS[method](model), limit, bf16))
    assert_regularized(found["optimizer"], STEPS)


@pytest.mark.parametrize(
    ("kind", "weight_decay"),
    [case(k, decay, is_slow=k == "SGDCPR" or decay == 0) for k in CLASSES for decay in (0.0, 0.1)],
)
def test_trainer_builds_the_optimizer(kind: str, weight_decay: float, tmp_path: Path) -> None:
    trainer = trainer_by_class(kind, settings_for(tmp_path, weight_decay=weight_decay))
    found = trained(trainer)
    model = language_model()
    matrices = set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name in matrices]},
        {"params": [p for name, p in named if name not in matrices], "regularize": False},
    ]
    cls, options = CLASSES[kind]
    expected = trained_plainly(model, cls(groups, **options))
    assert_same(found["weights"], expected["weights"])
    assert_same(found["optimizer"]["cpr"], expected["optimizer"]["cpr"])
    assert all(group["weight_decay"] == 0 for group in found["optimizer"]["param_groups"])


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        case(kind, build, is_slow=(kind == "AdamCPR") != (build is trainer_by_optimizers))
        for kind in CLASSES
        for build in (trainer_by_optimizers, trainer_by_class)
    ],
)
def test_trainer_resumes_bit_for_bit(kind: str, build: Any, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
    unbroken = trained(build(kind, settings))
    again = build(kind, settings_for(tmp_path / "again"))
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    resumed = trained(again, resume_from_checkpoint=str(checkpoint))
    assert_same(resumed, unbroken)
    assert_regularized(resumed["optimizer"], STEPS)


@pytest.mark.slow
def test_trainer_in_two_processes_equals_one(tmp_path: Path) -> None:
    results = run_in_two_processes("trainer", tmp_path)
    for method, build in METHODS.items():
        model = language_model().double()
        expected = trained_plainly(model, build(model))
        assert_same(results[f"{method} resumed"], results[method], method)
        assert_same(results[method], expected, method, rtol=1e-5, atol=1e-7)


# Accelerate


def prepared(
    method: str, mixed: str, size: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, ...]:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed, **options)
    model = network().to(dtype)
    optimizer = METHODS[method](model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = TensorDataset(*(tensor.to(dtype) for tensor in samples()))
    loader = DataLoader(data, batch_size=size)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def train_accelerated(parts: tuple[Any, ...], algorithm: str | None, epochs: int = 1) -> dict[str, Any]:
    accelerator, model, optimizer, loader, schedule = parts
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients and algorithm == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                elif accelerator.sync_gradients and algorithm == "value":
                    accelerator.clip_grad_value_(model.parameters(), LIMIT)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return state_of(accelerator.unwrap_model(model), optimizer.optimizer)


def loop_for(method: str, epochs: int = 1, **options: Any) -> dict[str, Any]:
    model = network()
    optimizer = METHODS[method](model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train_plainly(model, optimizer, epochs * batches(), schedule=schedule, limit=LIMIT, **options)
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("method", "mixed", "algorithm", "accumulate"),
    [
        case(m, mixed, a, n, is_slow=(a, n) != ("norm", 2))
        for m in METHODS
        for mixed in ("no", "bf16")
        for a in (None, "value", "norm")
        for n in (1, 2)
    ],
)
def test_accelerate_equals_plain_loop(
    method: str, mixed: str, algorithm: str | None, accumulate: int
) -> None:
    parts = prepared(method, mixed, gradient_accumulation_steps=accumulate)
    found = train_accelerated(parts, algorithm)
    autocast = torch.bfloat16 if mixed == "bf16" else None
    expected = loop_for(method, algorithm=algorithm, accumulate=accumulate, autocast=autocast)
    assert_same(found, expected)
    assert_regularized(found["optimizer"], steps=8 // accumulate)


@pytest.mark.parametrize("method", METHODS)
def test_accelerate_state_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    parts = prepared(method, "no")
    train_accelerated(parts, "norm")
    parts[0].save_state(str(tmp_path))
    reset_accelerate()
    parts = prepared(method, "no")
    parts[0].load_state(str(tmp_path))
    resumed = train_accelerated(parts, "norm")
    assert_same(resumed, loop_for(method, epochs=2, algorithm="norm"))


@pytest.mark.slow
def test_accelerate_in_two_processes_equals_one(tmp_path: Path) -> None:
    results = run_in_two_processes("accelerate", tmp_path)
    for method, build in METHODS.items():
        model = network().double()
        optimizer = build(model)
        data = [(x.double(), y.double()) for x, y in 2 * batches(8)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9**2)  # a step per process
        train_plainly(model, optimizer, data, schedule=schedule, limit=LIMIT, algorithm="norm")
        expected = state_of(model, optimizer)
        assert_same(results[method], expected, method, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algorithm", [None, "norm"])
@pytest.mark.parametrize("method", METHODS)
def test_accelerated_optimizer_skips_overflow(method: str, algorithm: str | None) -> None:
    """Accelerate refuses fp16 on the CPU; its optimizer with a scaler does not."""

    def scaler() -> torch.amp.GradScaler:  # its first scales are too large for float16
        return torch.amp.GradScaler("cpu", init_scale=2.0**26, backoff_factor=2.0**-4)

    accelerate.Accelerator(cpu=True)
    model = network()
    ours = scaler()
    optimizer = AcceleratedOptimizer(METHODS[method](model), device_placement=False, scaler=ours)
    skipped = 0
    for inputs, targets in batches():
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = nn.functional.mse_loss(model(inputs), targets)
        ours.scale(loss).backward()
        if algorithm is not None:
            ours.unscale_(optimizer.optimizer)
            clip(model, algorithm, LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        skipped += optimizer.step_was_skipped
    plain = network()
    expected = METHODS[method](plain)
    options = {"autocast": torch.float16, "scaler": scaler(), "limit": LIMIT}
    train_plainly(plain, expected, batches(), algorithm=algorithm, **options)
    assert_same(state_of(model, optimizer.optimizer), state_of(plain, expected))
    assert 0 < skipped < 8
    assert int(expected.state_dict()["cpr"]["state"]["step"]) == 8 - skipped
