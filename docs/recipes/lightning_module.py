"""Train a small byte-level language model on a text file: a LightningModule with AdamCPR.

    python lightning_module.py --text ../../README.md --out runs/bytes

It takes at most a minute on a CPU. The same command resumes from the last checkpoint; there is one after
every epoch.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnunet_cpr import AdamCPR, KappaWS


class ByteModel(lightning.LightningModule):
    """Causal transformer that predicts the next byte.

    It has no dropout, because Lightning's checkpoints do not contain the state of the random number
    generators, so that a resumed run would differ from an uninterrupted one.

    Args:
        width: width of the model; each head has 32 dimensions.
        layers: number of transformer layers.
        length: number of bytes in a sample.
        lr: highest learning rate.
        warmup: steps of linear learning-rate warm-up; CPR sets its bounds after twice as many.
    """

    def __init__(self, width: int, layers: int, length: int, lr: float, warmup: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, length, 256]`` of the next bytes of ``tokens`` ``[batch, length]``."""
        length = tokens.shape[1]
        hidden = self.bytes(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (text,) = batch
        logits = self(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.optimizers().cpr.metrics()
        self.log_dict({f"cpr/{name}": value for name, value in metrics.items()})

    def configure_optimizers(self) -> dict[str, Any]:
        lr, warmup = self.hparams["lr"], self.hparams["warmup"]
        optimizer = AdamCPR(self, lr=lr, betas=(0.9, 0.99), kappa=KappaWS(max(1, 2 * warmup)))
        steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            """Return the learning rate relative to the highest: a linear rise, then a cosine to 0.1."""
            if step < warmup:
                return (step + 1) / warmup
            progress = (step - warmup) / max(1, steps - warmup)
            return 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples(text: Path, length: int) -> TensorDataset:
    """Return chunks of ``length`` + 1 bytes, shuffled once, so that a resumed run has the same order.

    Raises:
        ValueError: the text is shorter than a chunk.
        OSError: the text cannot be read.
    """
    content = text.read_bytes()
    if len(content) <= length:
        raise ValueError(
            f"{text}: expected at least {length + 1} bytes, got {len(content)}; use a smaller --length"
        )
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    chunks = numbers.unfold(0, length + 1, length)
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))
    return TensorDataset(chunks[order])


def main(argv: list[str] | None = None) -> lightning.Trainer:
    """Train from the last checkpoint, if there is one, and return the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="text file to learn")
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--epochs", type=int, default=20)
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--length", type=int, default=128, help="bytes in a sample")
    add("--batch", type=int, default=8)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=10, help="steps of linear warm-up")
    args = parser.parse_args(argv)
    if args.warmup < 0:
        sys.exit(f"--warmup: expected 0 or more steps, got {args.warmup}")
    try:
        data = samples(args.text, args.length)
    except (OSError, ValueError) as error:
        sys.exit(f"--text: {error}")

    lightning.seed_everything(0)
    model = ByteModel(args.width, args.layers, args.length, args.lr, args.warmup)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        default_root_dir=args.out,
        callbacks=[ModelCheckpoint(args.out, save_last=True)],
        log_every_n_steps=1,
    )
    last = args.out / "last.ckpt"
    loader = DataLoader(data, batch_size=args.batch)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None, weights_only=True)
    return trainer


if __name__ == "__main__":
    main()
