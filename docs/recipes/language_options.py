"""Options, optimizers and checks that the recipes for language models share."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Slow imports are in the functions, so that --help is fast.
if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import TrainingArguments

    from nnunet_cpr.names.suffixes import BaselineChoice

SETTINGS = "settings.json"
"""File in the folder of a run: its options."""
DYNAMICS = "dynamics.csv"
"""The same: regularization value, bound and multiplier of each matrix over the steps."""

_NOT_SETTINGS = ("out", "processes", "batch_per_device", "accumulate", "save_every", "eval_every")
"""Options that do not change what is trained."""


def require(*packages: str) -> None:
    """Exit with the command that installs a package which is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            sys.exit(f"{error}; run: pip install 'nnunet-cpr[language]'")


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def positive(text: str) -> float:
    """Return a positive, finite number."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def complete_batch(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set the passes per step from the samples per step, and exit if they do not fit."""
    samples = args.batch_per_device * int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % samples:
        parser.error(
            f"--batch: expected a multiple of {samples}, the samples of a pass on all devices, got "
            f"{args.batch}; change --batch-per-device"
        )
    args.accumulate = args.batch // samples


def add_optimizer_options(parser: argparse.ArgumentParser, kappa: str) -> None:
    """Add the options that :func:`build_optimizer` reads; ``kappa`` describes the default bound."""
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=("adamcpr", "adamw"), default="adamcpr")
    add(
        "--kappa", metavar="BOUND", help=f"bound of CPR: k0.1, ki0x4, ws1000 or ip500 (default: {kappa})"
    )
    add("--mu", type=positive, help="update rate of CPR's Lagrange multipliers (default: 1)")
    add("--weight-decay", type=float, metavar="V", help="of adamw or the method (default: 0.01)")
    add(
        "--method",
        metavar="NAME",
        help="comparison method in place of AdamW's weight decay: adadecay4 (alpha 4), awd, cosine0.1, "
        "... (docs/reference/comparison-methods.md), or amos, an optimizer of its own",
    )


def complete_optimizer_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, kappa: str
) -> None:
    """Set defaults, and exit if an option does not belong to the optimizer or has a wrong value."""
    from nnunet_cpr.baselines.registry import BASELINES
    from nnunet_cpr.bounds import as_bound

    with_cpr = args.optimizer == "adamcpr"
    for option in ("weight_decay", "method") if with_cpr else ("kappa", "mu"):
        if getattr(args, option) is not None:
            other = "adamw" if with_cpr else "adamcpr"
            parser.error(f"--{option.replace('_', '-')} is for --optimizer {other}")
    try:
        if with_cpr:
            args.kappa = str(as_bound(args.kappa or kappa))
            args.mu = 1.0 if args.mu is None else args.mu
        else:
            args.weight_decay = 0.01 if args.weight_decay is None else args.weight_decay
            if not 0 <= args.weight_decay < float("inf"):
                parser.error(f"--weight-decay: expected 0 or more, got {args.weight_decay}")
            if args.method not in (None, "amos") and _find_method(args.method) is None:
                known = "amos, " + ", ".join(BASELINES)
                parser.error(f"--method {args.method}: unknown; choose from {known}")
    except ValueError as error:
        parser.error(str(error))


def _find_method(method: str) -> BaselineChoice | None:
    """Return the method of a word such as ``adadecay4``, one suffix of a run's name."""
    from nnunet_cpr.names import WrongName
    from nnunet_cpr.names.run_name import parse_run_name

    if "_" in method:  # several suffixes, of which the others would be ignored
        return None
    try:
        return parse_run_name(f"AdamW_{method.replace('.', 'p')}").baseline
    except WrongName:
        return None


def build_optimizer(args: argparse.Namespace, model: nn.Module, steps: int, **adam: Any) -> Optimizer:
    """Return the optimizer of the options for all trainable parameters of a model.

    Args:
        args: the options.
        model: the model; weight decay of every kind applies to the matrices that CPR would regularize.
        steps: optimizer steps of the whole training.
        adam: Adam's ``betas`` and ``eps``, if they differ from torch's; AMOS has neither.
    """
    import torch

    from nnunet_cpr import AdamCPR
    from nnunet_cpr.baselines import amos
    from nnunet_cpr.baselines.registry import BASELINES
    from nnunet_cpr.bounds import as_bound
    from nnunet_cpr.param_groups import regularized

    if args.optimizer == "adamcpr":
        if (earliest := as_bound(args.kappa).earliest) >= steps:
            sys.exit(f"--kappa {args.kappa}: no bound is set before step {earliest} of {steps}")
        return AdamCPR(model, lr=args.lr, kappa=args.kappa, mu=args.mu, **adam)
    if args.method == "amos":
        return amos(model, args.lr, args.weight_decay)
    matrices = regularized(model)
    others = [p for name, p in model.named_parameters() if p.requires_grad and name not in matrices]
    groups = [
        {"params": list(matrices.values()), "weight_decay": 0.0 if args.method else args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, fused=True, **adam)
    if args.method is None:
        return optimizer
    choice = _find_method(args.method)
    assert choice is not None  # checked with the options
    method = BASELINES[choice.keyword].build(model, args.weight_decay, steps, choice.value)
    return method.attach(optimizer)


def start_run(args: argparse.Namespace) -> None:
    """Write the options to the run's folder; exit if it holds a run with other options."""
    settings = {key: value for key, value in vars(args).items() if key not in _NOT_SETTINGS}
    settings = json.loads(json.dumps(settings, default=str))
    file = args.out / SETTINGS
    if file.exists():
        saved = json.loads(file.read_text())
        changed = [key for key in settings if saved.get(key) != settings[key]]
        if changed:
            key = changed[0]
            sys.exit(
                f"{args.out} was trained with {key} {saved.get(key)}, got {settings[key]}; "
                "choose another --out"
            )
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n")


def refuse_missing_bf16(bf16: bool) -> None:
    """Exit without a GPU with bfloat16; the Trainer's error names an option that the recipes lack."""
    from transformers.utils import is_torch_bf16_gpu_available

    if bf16 and not is_torch_bf16_gpu_available():
        sys.exit("--bf16: no GPU with bfloat16 is available; train in float32 with --no-bf16")


def refuse_data_parallel(settings: TrainingArguments) -> None:
    """Exit if one process sees several GPUs, because the Trainer would multiply the batch by them."""
    if settings.n_gpu > 1:
        sys.exit(
            f"expected one GPU per process, got {settings.n_gpu}; start with torchrun --nproc-per-node "
            f"{settings.n_gpu}, or select one GPU with CUDA_VISIBLE_DEVICES=0"
        )


def last_checkpoint(folder: Path, end: float = float("inf")) -> str | None:
    """Return the newest complete checkpoint before ``end``, from which the Trainer would train on.

    The Trainer writes trainer_state.json last.
    """
    complete = [path.parent.name for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = [name.removeprefix("checkpoint-") for name in complete]  # checkpoint-best has no step
    numbers = [int(step) for step in steps if step.isdecimal()]
    newest = max((number for number in numbers if number < end), default=None)
    return None if newest is None else str(folder / f"checkpoint-{newest}")
