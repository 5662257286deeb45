"""Lightning's Trainer against a plain torch loop: precision and clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnunet_cpr import CPR, SGDCPR, AdamCPR
from tests.helpers.resume_cases import assert_regularized, differences

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:lightning", "ignore::UserWarning:lightning"
)

LIMIT = 0.1
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamCPR": lambda model: AdamCPR(model, lr=0.05, kappa="ws2"),
    "SGDCPR": lambda model: SGDCPR(model, lr=0.02, kappa="ws2"),
    "attached": lambda model: CPR(model, kappa="ws2").attach(torch.optim.Adam(model.parameters(), 0.05)),
}


class Regression(lightning.LightningModule):
    def __init__(self, method: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
        self.network, self.method = nn.Sequential(*layers), method

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return METHODS[self.method](self)


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(32, width, generator=generator) for width in (6, 3))
    return DataLoader(TensorDataset(*data), batch_size=4)


def trained_by_lightning(method: str, precision: str, algorithm: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"precision": precision}
    if algorithm is not None:
        options |= {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": algorithm}
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **options, **quiet)
    model = Regression(method)
    trainer.fit(model, batches())
    return {"weights": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def trained_plainly(method: str, precision: str, algorithm: str | None) -> dict[str, Any]:
    model = Regression(method)
    optimizer = model.configure_optimizers()
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model.training_step(batch, 0)
        loss.backward()
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        elif algorithm == "value":
            nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("method", "precision", "algorithm"),
    [("AdamCPR", "32-true", None), ("SGDCPR", "bf16-mixed", "value"), ("attached", "32-true", "norm")],
)
def test_training_equals_plain_loop(method: str, precision: str, algorithm: str | None) -> None:
    found = trained_by_lightning(method, precision, algorithm)
    assert differences(found, trained_plainly(method, precision, algorithm)) == []
    if algorithm != "norm":  # a small step that is never too large
        assert_regularized(found["optimizer"], steps=8)
