"""Names of trainers, and the settings of each as users observe them."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch

from tests.golden.goldens import run_command
from tests.golden.tiny_trainer import as_json, build_trainer, set_weights, take_steps_at

NAMES = [
    # Families
    *(
        f"nnUNetTrainer{family}"
        for family in ("CPR", "AdamCPR", "MuonCPR", "SGD", "AdamW", "Muon", "AMOS")
    ),
    # Bounds
    "nnUNetTrainerCPR_ws2000",
    "nnUNetTrainerCPR_ws2p",
    "nnUNetTrainerCPR_ws0p5p_100epochs",
    "nnUNetTrainerCPR_ws50p_1epochs_3iters",
    "nnUNetTrainerCPR_k0p05",
    "nnUNetTrainerAdamCPR_k5en3_mu0p5",
    "nnUNetTrainerCPR_ki0x1p5",
    "nnUNetTrainerAdamCPR_ip50",
    "nnUNetTrainerMuonCPR_ws4000",
    "nnUNetTrainerAdamCPR_warmup500",
    "nnUNetTrainerAdamCPR_warmup500_ws1500",
    "nnUNetTrainerMuonCPR_warmup100_100epochs",
    # Regularization functions and CPR's other settings
    "nnUNetTrainerCPR_l2",
    "nnUNetTrainerCPR_l1_ws100",
    "nnUNetTrainerAdamCPR_std_ki0x2",
    "nnUNetTrainerCPR_huber_mu1e1",
    "nnUNetTrainerMuonCPR_std_ada",
    "nnUNetTrainerCPR_ada",
    "nnUNetTrainerCPR_ada_l1_k1_mu0p1_lr1en3_seed3_10epochs_20iters",
    # Learning rate, momentum, weight decay, length, seed
    "nnUNetTrainerCPR_lr1en1_momentum0p9_warmup100_20epochs_50iters_seed1",
    "nnUNetTrainerAdamCPR_lr3en3_warmup100_20epochs_50iters_seed2",
    "nnUNetTrainerMuonCPR_lr3en2_momentum0p8_warmup100_20epochs_50iters",
    "nnUNetTrainerSGD_lr5en3_wd1en3_5epochs",
    "nnUNetTrainerSGD_wd0_momentum0p9",
    "nnUNetTrainerSGD_wd1_warmup10_2epochs_50iters_seed0",
    "nnUNetTrainerAdamW_wd1en2_lr1en3_warmup0",
    "nnUNetTrainerMuon_wd1en2_momentum0p5",
    "nnUNetTrainerAMOS_lr1en2_warmup20_10epochs_50iters",
    "nnUNetTrainerCPR_warmup2000_100epochs_ws2000",
    "nnUNetTrainerCPR_10iters_1epochs_warmup5",
    # Comparison methods
    "nnUNetTrainerSGD_decoupled_wd1",
    "nnUNetTrainerSGD_adadecay4_wd1en1",
    "nnUNetTrainerAdamW_adadecay2_wd1en1_warmup0",
    "nnUNetTrainerSGD_awd_wd1en1",
    "nnUNetTrainerAdamW_awd_wd1en2_warmup0",
    "nnUNetTrainerSGD_cosine0p1_wd1_10epochs",
    "nnUNetTrainerSGD_rescale1",
    "nnUNetTrainerAdamW_rescale0p5_warmup0",
    "nnUNetTrainerSGD_corrected_wd1",
    "nnUNetTrainerAdamW_corrected_wd1_warmup0",
    "nnUNetTrainerSGD_cautious_wd1",
    "nnUNetTrainerMuon_cautious_wd1_warmup0",
    "nnUNetTrainerSGD_independent_wd1en2",
    "nnUNetTrainerSGD_norm1p5_wd1",
    "nnUNetTrainerSGD_normws2_wd1",
    "nnUNetTrainerSGD_hyperball",
    "nnUNetTrainerAdamW_hyperball_warmup0",
    "nnUNetTrainerMuon_decoupled_wd1en1_warmup0",
    # Other trainers
    "nnUNetTrainerCPR_on_nnUNetTrainerDA5",
    "nnUNetTrainerAdamCPR_ws100_20epochs_on_nnUNetTrainer_onlyMirror01",
    "nnUNetTrainerSGD_wd1en2_on_nnUNetTrainerDiceLoss",
    "nnUNetTrainerCPR_on_nnUNetTrainer_10epochs",
    "nnUNetTrainerMuonCPR_ws10_100epochs_on_nnUNetTrainerNoMirroring",
    "nnUNetTrainerAttachCPR_on_nnUNetTrainerAdam",
    "nnUNetTrainerAttachCPR_mu2_std_k1en1_on_nnUNetTrainerAdam",
    "nnUNetTrainerAttachCPR_ws20p_lr1en3_on_nnUNetTrainerAdam3en4",
    "nnUNetTrainerAttachCPR_ws5_on_nnUNetTrainerCosAnneal",
    "nnUNetTrainerPlain_20epochs_seed1_on_nnUNetTrainerDA5",
    "nnUNetTrainerPlain_cautious_wd1en1_on_nnUNetTrainerDA5",
    "nnUNetTrainerPlain_lr1en3_on_nnUNetTrainerVanillaAdam",
]
"""Names, each with suffixes in an order of its own."""

REFUSED = {
    # Misspelt, with the word of the correction
    "nnUNetTrainerCRP_ws200": "nnUNetTrainerCPR_ws200",
    "nnUNetTrainerSGDCPR": "nnUNetTrainerCPR",
    "nnUNetTrainerCPRAdam_ws9": "nnUNetTrainerAdamCPR_ws9",
    "nnUNetTrainerCPRws200": "underscore",
    "nnUNetTrainerCPR_ws2k": "nnUNetTrainerCPR_ws2000",
    "nnUNetTrainerCPR_warmstart100": "nnUNetTrainerCPR_ws100",
    "nnUNetTrainerSGD_weightdecay1en3": "nnUNetTrainerSGD_wd1en3",
    "nnUNetTrainerCPR_100epoch_ws5": "nnUNetTrainerCPR_100epochs_ws5",
    "nnUNetTrainerCPR_hubber": "nnUNetTrainerCPR_huber",
    "nnUNetTrainerSGD_adadecy4": "nnUNetTrainerSGD_adadecay4",
    "nnUNetTrainerCPR_lr0.1": "nnUNetTrainerCPR_lr0p1",
    "nnUNetTrainerCPR_lr1e-3": "nnUNetTrainerCPR_lr1en3",
    "nnUNetTrainerCPR_DA5": "_on_nnUNetTrainerDA5",
    "nnUNetTrainerCPR_ws": "_ws<N>",
    "nnUNetTrainerCPR_ws1p5": "_ws<N>",
    "nnUNetTrainerSGD_adadecay": "_adadecay<V>",
    # Out of range
    "nnUNetTrainerCPR_ws0": "steps",
    "nnUNetTrainerCPR_ws100p": "100",
    "nnUNetTrainerCPR_k0": "_k0",
    "nnUNetTrainerCPR_mu0": "mu",
    "nnUNetTrainerCPR_0epochs": "_0epochs",
    "nnUNetTrainerSGD_momentum1": "momentum",
    "nnUNetTrainerAdamCPR_warmup2000_5epochs": "2000",
    # Settings that the family does not take
    "nnUNetTrainerCPR_wd1en5": "_wd1en5",
    "nnUNetTrainerCPR_awd": "_awd",
    "nnUNetTrainerSGD_ws100": "nnUNetTrainerCPR",
    "nnUNetTrainerAdamW_ada": "nnUNetTrainerAdamCPR",
    "nnUNetTrainerAdamW_momentum0p9": "_momentum0p9",
    "nnUNetTrainerAMOS_awd": "_awd",
    "nnUNetTrainerSGD_rescale2_wd0p1": "_wd0p1",
    "nnUNetTrainerPlain_warmup9_on_nnUNetTrainerDA5": "_warmup9",
    # Other trainers
    "nnUNetTrainerCPR_on_nnUNetTrainerSGD_wd0": "_on_",
    "nnUNetTrainerCPR_on_": "_on_",
    "nnUNetTrainerCPR_on_nnUNetTrainerDA5_on_nnUNetTrainerDA5": "_on_",
    "nnUNetTrainerCPR_on_nnUNetTrainerNowhere": "nnUNetTrainerNowhere",
}
"""Wrong names and a word of the message."""

REFUSED_DOUBLES = {
    "nnUNetTrainerCPR_ws100_k0p1": "_k0p1",
    "nnUNetTrainerCPR_lr1en3_lr1en2": "_lr1en2",
    "nnUNetTrainerCPR_l1_std": "_std",
    "nnUNetTrainerCPR_ws2p_ws100": "_ws100",
    "nnUNetTrainerSGD_awd_rescale2": "_rescale2",
    "nnUNetTrainerAdamW_10epochs_wd1en2_20epochs": "_20epochs",
    "nnUNetTrainerCPR_seed1_ws5_seed1_on_nnUNetTrainerDA5": "_seed1",
}
"""Names with two settings of one kind, and a word of the message."""

_OPTIONS = ("momentum", "nesterov", "betas", "eps", "amsgrad", "weight_decay")


def observed_settings(name: str) -> dict[str, Any]:
    """Return the settings of a trainer that nnU-Net has built, and what its optimizer does."""
    torch.manual_seed(0)
    trainer = build_trainer(name)
    optimizer, epochs = trainer.optimizer, trainer.num_epochs
    state = optimizer.state_dict()
    rates = {}
    for epoch in sorted({0, 1, epochs // 2, epochs - 1}):
        trainer.lr_scheduler.step(epoch)
        rates[str(epoch)] = optimizer.param_groups[0]["lr"]
    set_weights(trainer)
    found = {
        "class": type(trainer).__name__,
        "other": next(c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("nnunetv2.")),
        "epochs": epochs,
        "iterations": trainer.num_iterations_per_epoch,
        "learning_rates": rates,
        "optimizer": _kind(optimizer),
        "groups": [
            [len(group["params"]), {key: group[key] for key in _OPTIONS if key in group}]
            for group in optimizer.param_groups
        ],
        "cpr": state["cpr"]["config"] if "cpr" in state else None,
        "regularized": len(state["cpr"]["names"]) if "cpr" in state else 0,
        "baseline": _baseline(state),
    }
    found = as_json(found)
    return {**found, "moved": [float(f"{m:.7g}") for m in take_steps_at(trainer, epochs // 2)]}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer with CPR, the torch class of another."""
    import nnunet_cpr

    names = [kind.__name__ for kind in type(optimizer).__mro__]
    known = [
        n for n in names if n in nnunet_cpr.__all__ or (n != "Optimizer" and hasattr(torch.optim, n))
    ]
    return known[0].removesuffix("W") if known else "other"  # decoupled decay is a setting of Adam, too


def _baseline(state: dict[str, Any]) -> Any:
    """Return the settings of a comparison method in the optimizer's state dict."""
    saved = state.get("baseline")
    return None if saved is None else saved.get("config")


def described_settings(name: str) -> dict[str, Any]:
    """Return numbers and identifiers that ``nnunet-cpr trainers NAME`` prints.

    The only function that knows the layout of that text.
    """
    done = run_command("trainers", name)
    assert done.status == 0 or "no matrix is regularized" in done.errors, done.errors
    rows: dict[str, str] = {}
    for line in done.output.splitlines():
        subject, text = re.match(r" ?(.*?)  +(.*)|()()", line).groups()[:2]
        if subject:
            rows[subject] = text.strip()
    length = re.search(
        r"([\d,]+) epochs? of ([\d,]+) iterations?, ([\d,]+) steps?", rows["length"]
    ).groups()
    rates = re.findall(r"([-+.e\d]+) \(epoch (\d+)\)", rows["learning rate"])
    warmup = re.search(r"warm-up over ([\d,]+) steps?", rows["learning rate"])
    found = {
        "family": rows["family"].partition(":")[0],
        "like": rows["like"].split()[0] if "like" in rows else None,
        "optimizer": rows["optimizer"].partition("(")[0],
        "learning_rates": {epoch: float(rate) for rate, epoch in rates},
        "warmup": _count(warmup.group(1)) if warmup else 0,
        "length": [_count(number) for number in length],
        "weight_decay": [float(n) for n in re.findall(r"\d[\de.-]*", rows["weight decay"])],
        "compare_with": rows["compare with"],
    }
    if "bound" in rows:
        step = re.search(r"step ([\d,]+)", rows["bound"])
        found |= {
            "regularizer": rows["regularized"].split()[0],
            "mu": float(re.search(r"mu = ([-.e\d]+)", rows["regularized"]).group(1)),
            "adaptive": "adaptive" in rows["regularized"],
            "bound": re.match(r"_(\w+)", rows["bound"]).group(1),
            "bound_step": _count(step.group(1)) if step else 0,
        }
    return found


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def is_found(name: str) -> bool:
    """Return True if nnU-Net's search finds a trainer with this name."""
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return recursive_find_trainer_class_by_name(name) is not None
        except (SystemExit, RuntimeError):
            return False
