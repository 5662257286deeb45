"""nnU-Net's configurations on tiny data with two channels, region-based labels and an ignore label."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import SimpleITK as sitk
import torch
from nnunetv2.dataset_conversion.generate_dataset_json import generate_dataset_json

from nnunet_cpr.datasets import phantom
from nnunet_cpr.nnunet.commands import nnunet_environment
from tests.helpers.workspace import Workspace

DATASET = "Dataset902_Matrix"
IGNORE = 3
LABELS = {"background": 0, "whole": [1, 2], "head": 2, "ignore": IGNORE}
REGIONS = {"(1, 2)", "2"}  # as nnU-Net spells them in its summaries
UNSEEN = "phantom_005"
PATCH_MEMORY = "0.03"  # GB: so little that nnU-Net plans a low resolution and the cascade


@dataclass(frozen=True)
class Model:
    """Options ``-tr``, ``-c``, ``-p`` and ``-f`` of nnU-Net's commands."""

    trainer: str
    configuration: str
    plans: str = "nnUNetPlans"
    fold: str = "0"

    @property
    def options(self) -> tuple[str, ...]:
        return ("-tr", self.trainer, "-p", self.plans, "-device", "cpu")


class MatrixSpace(Workspace):
    """A workspace with any number of models."""

    def train_model(self, model: Model, *options: str) -> None:
        self.run("nnUNetv2_train", "902", model.configuration, model.fold, *model.options, *options)

    def predict(self, model: Model, *options: str) -> Path:
        """Label maps of the unseen case, in the folder that is returned."""
        output = self.folder / "predictions" / self.model_folder(model).name
        self.run(
            "nnUNetv2_predict", "-i", str(self.raw / "imagesTs"), "-o", str(output), "-d", "902",
            "-c", model.configuration, "-f", model.fold, "-npp", "0", "-nps", "0",
            *model.options, *options,
        )  # fmt: skip
        return output

    @property
    def raw(self) -> Path:
        return self.folder / "nnUNet_raw" / self.dataset

    @property
    def preprocessed(self) -> Path:
        return self.folder / "nnUNet_preprocessed" / self.dataset

    @property
    def results(self) -> Path:
        return self.folder / "nnUNet_results" / self.dataset

    def model_folder(self, model: Model) -> Path:
        return self.results / f"{model.trainer}__{model.plans}__{model.configuration}"

    def fold_folder(self, model: Model) -> Path:
        return self.model_folder(model) / f"fold_{model.fold}"

    def final(self, model: Model) -> dict:
        path = self.fold_folder(model) / "checkpoint_final.pth"
        return torch.load(path, weights_only=False, map_location="cpu")

    def summary(self, model: Model) -> dict:
        return json.loads((self.fold_folder(model) / "validation" / "summary.json").read_text())

    def change_plans(self, source: str, target: str, **changes: object) -> None:
        """Copy plans with a network of few features and other settings of each configuration."""
        plans = json.loads((self.preprocessed / f"{source}.json").read_text())
        plans["plans_name"] = target
        for configuration in plans["configurations"].values():
            if "architecture" in configuration:
                network = configuration["architecture"]["arch_kwargs"]
                network["features_per_stage"] = [4 * (i + 1) for i in range(network["n_stages"])]
                configuration.update({"batch_size": 2, **changes})
        (self.preprocessed / f"{target}.json").write_text(json.dumps(plans))


def make_space(folder: Path) -> MatrixSpace:
    """Plan and preprocess the data with nnU-Net's commands."""
    space = MatrixSpace(folder, DATASET, nnunet_environment(folder, processes=1))
    del space.environment["nnUNet_extTrainer"]  # every process finds the trainers by itself
    space.environment["nnUNet_compile"] = "f"
    _write_data(space.raw)
    limit = ("-gpu_memory_target", PATCH_MEMORY, "-overwrite_plans_name")
    space.run(
        "nnUNetv2_plan_and_preprocess", "-d", "902", *limit, "nnUNetPlans",
        "-c", "2d", "3d_fullres", "3d_lowres", "-np", "1",
    )  # fmt: skip
    residual = ("-pl", "nnUNetPlannerResEncM", *limit, "nnUNetResEncUNetMPlans")
    space.run("nnUNetv2_plan_experiment", "-d", "902", *residual)
    for plans in ("nnUNetPlans", "nnUNetResEncUNetMPlans"):
        space.change_plans(plans, plans)
    space.environment["nnUNet_n_proc_DA"] = "0"
    return space


def read(path: Path) -> sitk.Image:
    return sitk.ReadImage(str(path))


def array(path: Path) -> np.ndarray:
    return sitk.GetArrayFromImage(read(path))


def _write_data(folder: Path) -> None:
    """Write phantoms with a second channel and, in training cases, an unlabelled slab."""
    phantom.write_dataset(folder, training_cases=5)
    for path in sorted(folder.glob("images*/*_0000.nii.gz")):
        image = read(path)
        sitk.WriteImage(1000 - image, str(path).replace("_0000.", "_0001."))
    for path in sorted(folder.glob("labelsTr/*.nii.gz")):
        labels = read(path)
        labels[:, :8, :] = IGNORE
        sitk.WriteImage(labels, str(path))
    generate_dataset_json(
        str(folder),
        channel_names={0: "MRI", 1: "inverted"},
        labels=LABELS,
        regions_class_order=[1, 2],
        num_training_cases=5,
        file_ending=".nii.gz",
    )
