"""Lightning's Trainer against a plain torch loop: precision, clipping, resuming and two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    case,
    network,
    samples,
    state_of,
    train_plainly,
)
from tests.helpers.gloo_launch import run_in_two_processes

lightning = pytest.importorskip("lightning")

from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from nnunet_cpr import SGDCPR, AdamCPR, KappaWS  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:lightning", "ignore::UserWarning:lightning"
)

LIMIT = 0.1
ALGORITHMS = [None, "value", "norm"]
TRUE = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Build = Callable[[nn.Module], torch.optim.Optimizer]


class Regression(lightning.LightningModule):
    """Lightning module of the regression, optionally with manual optimization."""

    def __init__(
        self,
        build: Build,
        decay: float | None = None,
        manual: bool = False,
        algorithm: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network()
        self.build = build
        self.decay = decay
        self.algorithm = algorithm
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
        if self.algorithm is not None:
            self.clip_gradients(optimizer, LIMIT, self.algorithm)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self)
        if self.decay is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_for(
    precision: str,
    algorithm: str | None = None,
    device: str = "cpu",
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> lightning.Trainer:
    if precision == "16-mixed" and device == "cpu":  # Lightning replaces it on the CPU; its plugin works
        scaler = scaler or torch.amp.GradScaler("cpu")
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        options["precision"] = precision
    if algorithm is not None:
        options |= {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": algorithm}
    return lightning.Trainer(
        accelerator=device,
        **{"max_epochs": 1, "devices": 1} | options,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False},
    )


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=4)


def trained_by_lightning(
    trainer: lightning.Trainer, model: Regression, data: DataLoader | None = None, **options: Any
) -> dict[str, Any]:
    trainer.fit(model, data or loader(), **options)
    return state_of(model, trainer.optimizers[0])


def trained_plainly(
    build: Build,
    precision: str,
    device: str = "cpu",
    decay: float | None = None,
    epochs: int = 1,
    **options: Any,
) -> dict[str, Any]:
    dtype = TRUE.get(precision, torch.float32)
    model = Regression(build).to(device, dtype)
    optimizer = build(model)
    data = [(x.to(device, dtype), y.to(device, dtype)) for x, y in batches()]
    if precision == "16-mixed":
        options.setdefault("scaler", torch.amp.GradScaler(device))
    train_plainly(
        model,
        optimizer,
        epochs * data,
        limit=LIMIT,
        autocast=MIXED.get(precision),
        schedule=decay and torch.optim.lr_scheduler.ExponentialLR(optimizer, decay),
        **options,
    )
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("precision", "algorithm", "method"),
    [
        case(p, a, m, is_slow=m == "AdamW with CPR" or (p in TRUE and (a, m) != ("norm", "AdamCPR")))
        for p in [*TRUE, *MIXED]
        for a in ALGORITHMS
        for m in METHODS
    ],
)
def test_training_equals_plain_loop(precision: str, algorithm: str | None, method: str) -> None:
    build = METHODS[method]
    found = trained_by_lightning(trainer_for(precision, algorithm), Regression(build))
    assert_same(found, trained_plainly(build, precision, algorithm=algorithm))
    assert found["weights"]["network.0.weight"].dtype == TRUE.get(precision, torch.float32)
    if algorithm != "norm":  # a small step that is never too large
        assert_regularized(found["optimizer"], steps=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["AdamCPR", "SGDCPR"])
@pytest.mark.parametrize("precision", MIXED)
def test_mixed_precision_clips_on_gpu(precision: str, method: str) -> None:
    build = METHODS[method]
    found = trained_by_lightning(trainer_for(precision, "norm", "cuda"), Regression(build))
    expected = trained_plainly(build, precision, "cuda", algorithm="norm")
    assert_same(found["weights"], expected["weights"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("precision", "algorithm", "method"),
    [
        case(p, a, m, is_slow=(p, m) != ("bf16-mixed", "AdamCPR"))
        for p, a in [
            ("32-true", "norm"),
            ("bf16-mixed", "value"),
            ("bf16-mixed", "norm"),
            ("16-mixed", None),
        ]
        for m in METHODS
    ],
)
def test_manual_optimization_equals_plain_loop(
    precision: str, algorithm: str | None, method: str
) -> None:
    build = METHODS[method]
    model = Regression(build, manual=True, algorithm=algorithm)
    found = trained_by_lightning(trainer_for(precision), model)
    expected = trained_plainly(build, precision, algorithm=algorithm)
    assert_same(found, expected)


@pytest.mark.parametrize("method", [case(m, is_slow=m != "SGDCPR") for m in METHODS])
def test_accumulated_gradients_equal_plain_loop(method: str) -> None:
    build = METHODS[method]
    trainer = trainer_for("bf16-mixed", "norm", accumulate_grad_batches=2)
    found = trained_by_lightning(trainer, Regression(build, decay=0.9))
    expected = trained_plainly(build, "bf16-mixed", decay=0.9, algorithm="norm", accumulate=2)
    assert_same(found, expected)
    assert int(found["optimizer"]["cpr"]["state"]["step"]) == 4


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [case(m, a, is_slow=(m, a) != ("AdamCPR", "norm")) for m in METHODS for a in ALGORITHMS],
)
def test_overflow_skips_the_step(method: str, algorithm: str | None) -> None:
    build = METHODS[method]

    def scaler() -> torch.amp.GradScaler:  # its first three scales are too large for float16
        return torch.amp.GradScaler("cpu", init_scale=2.0**26, backoff_factor=2.0**-4)

    trainer = trainer_for("16-mixed", algorithm, scaler=scaler())
    found = trained_by_lightning(trainer, Regression(build))
    expected = trained_plainly(build, "16-mixed", algorithm=algorithm, scaler=scaler())
    assert_same(found, expected)
    taken = int(found["optimizer"]["cpr"]["state"]["step"])
    assert 0 < taken < 8


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_explicit_fused_step_refuses_clipping(kind: str, ours: bool, precision: str) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        if ours:
            return {"Adam": AdamCPR, "SGD": SGDCPR}[kind](model, lr=0.01, fused=True)
        return {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[kind](
            model.parameters(), lr=0.01, fused=True
        )

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trained_by_lightning(trainer_for(precision, "norm"), Regression(build))


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("kind", [AdamCPR, SGDCPR])
def test_explicit_fused_step_without_clipping(kind: type, precision: str) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model, lr=0.02, kappa=KappaWS(2), fused=True)

    found = trained_by_lightning(trainer_for(precision), Regression(build))
    assert_same(found, trained_plainly(build, precision))
    assert_regularized(found["optimizer"], steps=8)


@pytest.mark.parametrize(
    ("precision", "method"),
    [
        case(p, m, is_slow=(p, m) != ("16-mixed", "AdamCPR"))
        for p in ("32-true", "16-mixed", "bf16-true")
        for m in METHODS
    ],
)
def test_resumed_training_equals_unbroken_one(precision: str, method: str, tmp_path: Path) -> None:
    build = METHODS[method]
    trainer = trainer_for(precision)
    trainer.fit(Regression(build, decay=0.9), loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer = trainer_for(precision, max_epochs=2)
    found = trained_by_lightning(
        trainer, Regression(build, decay=0.9), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert_same(found, trained_plainly(build, precision, decay=0.9, epochs=2))
    assert int(found["optimizer"]["cpr"]["state"]["step"]) == 16


@pytest.mark.parametrize(
    ("precision", "method"),
    [
        case(p, m, is_slow=p == "32-true" or m == "AdamW with CPR")
        for p in ("32-true", *MIXED)
        for m in METHODS
    ],
)
def test_fabric_with_clipping_equals_plain_loop(precision: str, method: str) -> None:
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # as in trainer_for
        scaler = torch.amp.GradScaler("cpu")
        options = {"plugins": FabricMixedPrecision("16-mixed", "cpu", scaler)}
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **options)
    module = Regression(METHODS[method])
    model, optimizer = fabric.setup(module, METHODS[method](module))
    for inputs, targets in batches():
        fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    expected = trained_plainly(METHODS[method], precision, algorithm="norm")
    assert_same(state_of(module, optimizer.optimizer), expected)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    results = run_in_two_processes("lightning", tmp_path)
    for method, build in METHODS.items():
        expected = trained_plainly(build, "64-true", decay=0.9, epochs=2, algorithm="norm")
        assert_same(results[method], expected, method, rtol=1e-5, atol=1e-7)
