"""Lightning's Trainer against a plain torch loop: precision, clipping, resuming and two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.client_training import (
    METHODS,
    assert_regularized,
    assert_same,
    batches,
    network,
    samples,
    state_of,
    train_plainly,
)

lightning = pytest.importorskip("lightning")

from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:lightning", "ignore::UserWarning:lightning"
)

LIMIT = 0.1
TRUE = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Build = Callable[[nn.Module], torch.optim.Optimizer]


class Regression(lightning.LightningModule):
    """Lightning module of the regression, optionally with manual optimization."""

    def __init__(
        self,
        build: Build,
        manual: bool = False,
    ) -> None:
        super().__init__()
        self.network = network()
        self.build = build
        self.automatic_optimization = not manual

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, LIMIT, "norm")
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return self.build(self)


def trainer_for(
    precision: str,
    algorithm: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> lightning.Trainer:
    if precision == "16-mixed":  # Lightning replaces it on the CPU; its plugin works
        scaler = scaler or torch.amp.GradScaler("cpu")
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        options["precision"] = precision
    if algorithm is not None:
        options |= {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": algorithm}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        **options,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def trained_by_lightning(trainer: lightning.Trainer, model: Regression) -> dict[str, Any]:
    trainer.fit(model, DataLoader(TensorDataset(*samples()), batch_size=4))
    return state_of(model, trainer.optimizers[0])


def trained_plainly(
    build: Build,
    precision: str,
    **options: Any,
) -> dict[str, Any]:
    dtype = TRUE.get(precision, torch.float32)
    model = Regression(build).to(dtype)
    optimizer = build(model)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches()]
    if precision == "16-mixed":
        options.setdefault("scaler", torch.amp.GradScaler("cpu"))
    train_plainly(
        model,
        optimizer,
        data,
        limit=LIMIT,
        autocast=MIXED.get(precision),
        **options,
    )
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("precision", "algorithm", "method"),
    [
        *((p, "norm", "AdamCPR") for p in [*TRUE, *MIXED]),
        ("bf16-mixed", "value", "SGDCPR"),
        ("16-mixed", None, "AdamW with CPR"),
    ],
)
def test_training_equals_plain_loop(precision: str, algorithm: str | None, method: str) -> None:
    build = METHODS[method]
    found = trained_by_lightning(trainer_for(precision, algorithm), Regression(build))
    assert_same(found, trained_plainly(build, precision, algorithm=algorithm))
    assert found["weights"]["network.0.weight"].dtype == TRUE.get(precision, torch.float32)
    if algorithm != "norm":  # a small step that is never too large
        assert_regularized(found["optimizer"], steps=8)


def test_manual_optimization_equals_plain_loop() -> None:
    build = METHODS["SGDCPR"]
    found = trained_by_lightning(trainer_for("bf16-mixed"), Regression(build, manual=True))
    assert_same(found, trained_plainly(build, "bf16-mixed", algorithm="norm"))


def test_overflow_skips_the_step() -> None:
    build = METHODS["AdamCPR"]

    def scaler() -> torch.amp.GradScaler:  # its first three scales are too large for float16
        return torch.amp.GradScaler("cpu", init_scale=2.0**26, backoff_factor=2.0**-4)

    trainer = trainer_for("16-mixed", "norm", scaler=scaler())
    found = trained_by_lightning(trainer, Regression(build))
    expected = trained_plainly(build, "16-mixed", algorithm="norm", scaler=scaler())
    assert_same(found, expected)
    taken = int(found["optimizer"]["cpr"]["state"]["step"])
    assert 0 < taken < 8


def test_fabric_with_clipping_equals_plain_loop() -> None:
    method, precision = "AdamCPR", "16-mixed"
    plugin = FabricMixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))  # as in trainer_for
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    module = Regression(METHODS[method])
    model, optimizer = fabric.setup(module, METHODS[method](module))
    for inputs, targets in batches():
        fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    expected = trained_plainly(METHODS[method], precision, algorithm="norm")
    assert_same(state_of(module, optimizer.optimizer), expected)
