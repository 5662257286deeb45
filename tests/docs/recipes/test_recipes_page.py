"""Code blocks of docs/how-to/libraries.md on Hugging Face and Lightning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nnunet_cpr import AdamCPR, KappaWS
from tests.docs.recipes import recipe_runs

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

PAGE = (recipe_runs.RECIPES.parent / "how-to" / "libraries.md").read_text()


IMPORTED = {"AdamCPR": AdamCPR, "KappaWS": KappaWS}


def snippet(word: str) -> str:
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if word in code]
    return code


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    )


def test_hugging_face_snippet_trains(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    tokens = torch.arange(8)
    names: dict[str, Any] = {"model": tiny_gpt2(), "data": [{"input_ids": tokens, "labels": tokens}] * 8}
    code = snippet("LoggingTrainer").replace("runs/out", str(tmp_path))
    code = code.replace("10_000", "3").replace("=500", "=1").replace("cosine", "linear")
    exec(code.replace("KappaWS(1000)", "KappaWS(1)"), names)
    assert "measure_to_kappa" in names["trainer"].state.log_history[-1]


def test_lora_snippet_selects_a_and_b() -> None:
    pytest.importorskip("peft")
    names: dict[str, Any] = {"base": tiny_gpt2(), **IMPORTED}
    exec(snippet("all-linear"), names)
    selected = names["optimizer"].cpr.names
    assert len(selected) == 8
    trainable = re.search(r"`(\[\(name, p\) .*?\])`", PAGE)
    assert trainable is not None
    assert AdamCPR(eval(trainable[1], names)).cpr.names == selected


def test_lightning_snippet_trains() -> None:
    lightning = pytest.importorskip("lightning")
    names: dict[str, Any] = {"torch": torch, **IMPORTED}
    exec(snippet("def configure_optimizers"), names)

    class Module(lightning.LightningModule):
        configure_optimizers = names["configure_optimizers"]

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_steps=2, enable_model_summary=False, **quiet).fit(module, torch.ones(4, 2, 3))
    assert module.optimizers().cpr.step_count == 2
