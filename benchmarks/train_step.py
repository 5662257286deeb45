"""Ask what CPR costs an iteration of nnU-Net, for its users: ``python -m benchmarks.train_step``.

Run ``python -m benchmarks.train_step --help``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.limits import CheckOption, Limit, check_limits
from benchmarks.measure import Timing, as_json, in_turn, machine, require_device
from nnunet_cpr.files import atomic_write

_DATASET, _CONFIGURATION = "Dataset902_Benchmark", "3d_fullres"
PAIRS = {
    "nnUNetTrainer": "nnUNetTrainerCPR_ki0x0p5_mu1en3",
    "nnUNetTrainerAdamW": "nnUNetTrainerAdamCPR_ki0x0p5_mu1en3",
    "nnUNetTrainerSGD": "nnUNetTrainerSGD_ema",
}
"""Trainers with weight decay, and the same with CPR, which corrects every matrix from the start, or with
averaged weights."""
BARS = {
    "cpu": {"nnUNetTrainer": 1.005, "nnUNetTrainerSGD": 1.01},
    "cuda": {"nnUNetTrainer": 1.0, "nnUNetTrainerAdamW": 1.01, "nnUNetTrainerSGD": 1.01},
}
"""Largest ratio of both iterations."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Duration for each pair of trainers.")] = 120.0,
    rounds: Annotated[int, typer.Option(min=2, help="Minimum number of iterations of each.")] = 7,
    patch: Annotated[int, typer.Option(help="Side of the patch; 0: 64 on a CPU, 128 on a GPU.")] = 0,
    compiled: Annotated[bool, typer.Option(help="torch.compile the network, as nnU-Net does.")] = True,
    checks: CheckOption = False,
    output: Annotated[Path | None, typer.Option(help="Folder for train_step_<device>_*.json.")] = None,
) -> None:
    """Time training iterations of nnU-Net's trainers: forward, backward, clipping and step."""
    console = Console(width=110)
    require_device(device)
    edge = patch or (64 if device == "cpu" else 128)
    if edge % 32 or edge < 64:
        raise typer.BadParameter(f"--patch: expected a multiple of 32, at least 64, got {edge}")
    machine_info = machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine_info.items()))
    results: dict[str, dict[str, Timing]] = {}
    shared: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder), compiled)
        for base, ours in PAIRS.items():
            iterations = {name: Iteration(name, device, edge) for name in (base, ours)}
            timings = in_turn({n: i.run for n, i in iterations.items()}, base, seconds, rounds)
            results[base] = timings
            shared[base] = ratio_with_the_rest_shared(iterations, timings, base, ours)
            console.print(_table(f"2 patches of {edge}^3, {device}", base, timings, iterations))
            console.print(
                "Ratio with the median time of everything but the optimizer step, which is the same "
                f"code: {shared[base]:.4f}\n"
            )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        pairs = {base: as_json(timings) for base, timings in results.items()}
        document = {"machine": machine_info, "device": device, "patch": edge, "pairs": pairs}
        document["ratio_with_the_rest_shared"] = shared
        file = output / f"train_step_{device}_{'compiled' if compiled else 'eager'}.json"
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"written: {file}", soft_wrap=True)
    if checks:
        measured = [
            (Limit(f"{PAIRS[base]} / {base}, one iteration", limit), shared[base])
            for base, limit in BARS[device].items()
        ]
        if not check_limits(measured, console):
            raise typer.Exit(1)


def set_environment(folder: Path, compiled: bool) -> None:
    """Set the environment variables of nnU-Net, which reads them when it is imported."""
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ[name] = str(folder / name)
    os.environ["nnUNet_compile"] = "t" if compiled else "f"
    # nnU-Net infers the format of the preprocessed data from the suffixes of the files.
    preprocessed = folder / "nnUNet_preprocessed" / _DATASET / f"nnUNetPlans_{_CONFIGURATION}"
    preprocessed.mkdir(parents=True)
    (preprocessed / "case.b2nd").touch()


class Iteration:
    """Training iteration of a trainer on one batch of noise, and the times of its optimizer steps."""

    def __init__(self, name: str, device: str, edge: int) -> None:
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        from nnunet_cpr.nnunet.trainer import trainer_class

        trainer_type = trainer_class(name) or nnUNetTrainer
        labels = {"background": 0, "one": 1, "two": 2}
        dataset = {"channel_names": {"0": "MRI"}, "labels": labels, "file_ending": ".nii.gz"}
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = trainer_type(_plans(edge), _CONFIGURATION, 0, dataset, torch.device(device))
            self.trainer.initialize()
            settings = getattr(self.trainer, "settings", None)
            if settings is not None and settings.training.ema is not None:
                with mock.patch.object(nnUNetTrainer, "on_train_start"):  # which loads data
                    self.trainer.on_train_start()
        self.trainer.network.train()

        generator = torch.Generator().manual_seed(0)
        sizes = [3 * (edge // 2**i,) for i in range(5)]  # deep supervision
        targets = [torch.randint(0, 3, (2, 1, *s), generator=generator).float() for s in sizes]
        data = torch.randn((2, 1, edge, edge, edge), generator=generator)
        self.batch = {"data": data, "target": targets}
        self.step_seconds: list[float] = []
        """Times of the optimizer steps; on a GPU the host's, as waiting would change the iteration."""
        self._step = self.trainer.optimizer.step
        self.trainer.optimizer.step = self._timed_step

    def run(self) -> None:
        """Run one iteration."""
        self.trainer.train_step(self.batch)

    def _timed_step(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._step(*args, **kwargs)
        self.step_seconds.append(time.perf_counter() - start)
        return result


def ratio_with_the_rest_shared(
    iterations: dict[str, Iteration], timings: dict[str, Timing], base: str, ours: str
) -> float:
    """Return the ratio of both iterations with the same time for everything but the optimizer step.

    On a CPU iterations vary by far more than half a percent, the difference of interest. On a GPU, of
    whose time a step has no separate part, the ratio is that of the iterations.
    """
    if iterations[base].trainer.device.type != "cpu":
        return timings[ours].ratio
    steps = {n: statistics.median(i.step_seconds) for n, i in iterations.items()}
    rest = statistics.median(t.milliseconds / 1e3 - steps[n] for n, t in timings.items())
    return (rest + steps[ours]) / (rest + steps[base])


def _plans(edge: int) -> dict[str, Any]:
    """Return nnU-Net's plans for one MRI channel with its 3-D U-Net of 31 M parameters."""
    stages = 6
    network = {
        "n_stages": stages,
        "features_per_stage": [32, 64, 128, 256, 320, 320],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[3, 3, 3]] * stages,
        "strides": [[1, 1, 1]] + [[2, 2, 2]] * (stages - 1),
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    resampling = "resample_data_or_seg_to_shape"
    configuration = {
        "data_identifier": f"nnUNetPlans_{_CONFIGURATION}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [edge] * 3,
        "median_image_size_in_voxels": [edge] * 3,
        "spacing": [1.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        **{f"resampling_fn_{kind}": resampling for kind in ("data", "seg", "probabilities")},
        **{f"resampling_fn_{kind}_kwargs": {} for kind in ("data", "seg", "probabilities")},
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": network,
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": False,
    }
    return {
        "dataset_name": _DATASET,
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {_CONFIGURATION: configuration},
        "label_manager": "LabelManager",
        "continue_training": False,
    }


def _table(title: str, base: str, timings: dict[str, Timing], iterations: dict[str, Iteration]) -> Table:
    table = Table(title=f"One training iteration, {title}")
    table.add_column("trainer")
    for heading in ("ms", "step, ms", f"/ {base}", "quartiles", "rounds"):
        table.add_column(heading, justify="right")
    for name, t in timings.items():
        step = f"{1e3 * statistics.median(iterations[name].step_seconds):.3g}"
        quartiles = f"{t.ratio_low:.3f} to {t.ratio_high:.3f}"
        table.add_row(name, f"{t.milliseconds:.4g}", step, f"{t.ratio:.3f}", quartiles, str(t.rounds))
    return table


if __name__ == "__main__":
    app()
