"""Train the four annotated examples of ``docs/choose/progress-figure.md`` on the data of the demo.

    python docs/figures/progress_figures.py [--folder FOLDER] [--output FOLDER]

Four trainings of 120 steps with nnU-Net's own trainer, a few minutes each on two CPU cores. Trainings
that are finished in the folder are not repeated. Seeds are fixed and the data are loaded in the process
of the training, so that the figures are the same on the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.image
import matplotlib.pyplot as plt
import torch
from PIL import Image

from nnunet_cpr import demo
from nnunet_cpr.datasets import phantom
from nnunet_cpr.datasets.small_plans import write_small_plans
from nnunet_cpr.nnunet.commands import nnunet_environment, run
from nnunet_cpr.nnunet.progress_figure import FIGURE_NAME

HERE = Path(__file__).parent
SETTINGS = "lr3en3_warmup10_12epochs_10iters_seed0"
TRAINERS = {
    "good": f"nnUNetTrainerAdamCPR_ws20_{SETTINGS}",
    "too-tight": f"nnUNetTrainerAdamCPR_ki0x0p3_{SETTINGS}",
    "too-loose": f"nnUNetTrainerAdamCPR_ki0x50_{SETTINGS}",
    "never-set": f"nnUNetTrainerAdamCPR_ws5000_{SETTINGS}",
}
NOTES = {
    "good": [
        (0.03, 0.98, "1"), (0.30, 0.74, "2"), (0.66, 0.74, "3"), (0.40, 0.28, "4"), (0.02, 0.585, "5"),
    ],
    "too-tight": [(0.03, 0.98, "1"), (0.205, 0.78, "2"), (0.60, 0.74, "3"), (0.33, 0.28, "4")],
    "too-loose": [(0.03, 0.98, "1"), (0.60, 0.74, "2"), (0.60, 0.28, "3")],
    "never-set": [(0.03, 0.98, "1"), (0.60, 0.74, "2"), (0.60, 0.28, "3")],
}  # fmt: skip
"""Numbers in circles, at fractions of the width from the left and of the height from the bottom."""


def prepare(folder: Path) -> None:
    """Generate the demo's data, plan and preprocess them, and set nnU-Net's variables."""
    environment = nnunet_environment(folder, processes=1)
    environment["nnUNet_compile"] = "f"
    os.environ.update(environment)
    preprocessed = folder / "nnUNet_preprocessed" / demo.DATASET
    if not (preprocessed / f"{demo.PLANS}.json").exists():
        phantom.write_dataset(folder / "nnUNet_raw" / demo.DATASET)
        command = ["nnUNetv2_plan_and_preprocess", "-d", "901", "-c", demo.CONFIGURATION, "-np", "1"]
        run(command, folder / "plan.log", environment)
        write_small_plans(preprocessed, "nnUNetPlans", demo.PLANS, patch=32)
    os.environ["nnUNet_n_proc_DA"] = "0"


def train(folder: Path, name: str) -> Path:
    """Train fold 0 with 2 validation iterations an epoch, and return its folder."""
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    preprocessed = folder / "nnUNet_preprocessed" / demo.DATASET
    plans = json.loads((preprocessed / f"{demo.PLANS}.json").read_text())
    trainer = recursive_find_trainer_class_by_name(name)(
        plans={**plans, "continue_training": False},
        configuration=demo.CONFIGURATION,
        fold=0,
        dataset_json=json.loads((preprocessed / "dataset.json").read_text()),
        device=torch.device("cpu"),
    )
    output = Path(trainer.output_folder)
    if not (output / "checkpoint_final.pth").exists():
        trainer.num_val_iterations_per_epoch = 2
        trainer.run_training()
    return output


def annotate(source: Path, target: Path, notes: list[tuple[float, float, str]]) -> None:
    """Write a copy of a figure with numbers in circles."""
    picture = matplotlib.image.imread(source)
    height, width = picture.shape[:2]
    figure = plt.figure(figsize=(width / 100, height / 100), dpi=100)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(picture)
    ax.axis("off")
    for x, y, text in notes:
        circle = {"boxstyle": "circle,pad=0.25", "facecolor": "#ffd400", "edgecolor": "black"}
        ax.text(
            x, y, text, transform=ax.transAxes, fontsize=15, fontweight="bold", bbox=circle,
            ha="center", va="center",
        )  # fmt: skip
    figure.savefig(target)
    plt.close(figure)
    with Image.open(target) as image:
        image.convert("RGB").quantize(256).save(target, optimize=True)


def main() -> None:
    """Train, and write ``progress-*.png`` beside this file."""
    parser = argparse.ArgumentParser(description="Train the examples of cpr_progress.png.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "progress-figures")
    parser.add_argument("--output", type=Path, default=HERE)
    given = parser.parse_args()
    folder, output = given.folder.resolve(), given.output.resolve()
    prepare(folder)
    for key, name in TRAINERS.items():
        annotate(train(folder, name) / FIGURE_NAME, output / f"progress-{key}.png", NOTES[key])


if __name__ == "__main__":
    main()
