"""Run MONAI's nnUNetV2Runner on a list of images.

A process of its own: nnU-Net reads the names of its folders once, when it is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from monai.apps.nnunet import nnUNetV2Runner
from nnunetv2.inference import predict_from_raw_data

from nnunet_cpr.datasets.small_plans import write_small_plans


def main(folder: Path, trainer: str) -> None:
    config = {
        "modality": "MRI",
        "datalist": str(folder / "datalist.json"),
        "dataroot": str(folder / "phantoms"),
        "dataset_name_or_id": "7",
        "nnunet_raw": os.environ["nnUNet_raw"],
        "nnunet_preprocessed": os.environ["nnUNet_preprocessed"],
        "nnunet_results": os.environ["nnUNet_results"],
    }
    runner = nnUNetV2Runner(config, trainer_class_name=trainer, export_validation_probabilities=False)
    runner.convert_dataset()
    runner.plan_and_process(npfp=1, c=("3d_fullres",), n_proc=(1,))
    dataset = Path(os.environ["nnUNet_preprocessed"]) / "Dataset007_phantoms"
    write_small_plans(dataset, "nnUNetPlans", "nnUNetPlans", patch=32)

    os.environ["nnUNet_n_proc_DA"] = "0"  # repeatable training; nnU-Net cannot plan with it
    runner.train_single_model(config="3d_fullres", fold=0)
    model = Path(os.environ["nnUNet_results"]) / dataset.name / f"{trainer}__nnUNetPlans__3d_fullres"
    shutil.move(model / "fold_0" / "validation", folder / "validation_after_training")
    runner.validate_single_model("3d_fullres", 0)

    # The runner predicts in its own process, on nnU-Net's default device.
    on_cpu = partial(predict_from_raw_data.nnUNetPredictor, device=torch.device("cpu"))
    predict_from_raw_data.nnUNetPredictor = on_cpu
    runner.predict(
        str(Path(os.environ["nnUNet_raw"]) / dataset.name / "imagesTs"),
        str(folder / "predicted_by_monai"),
        str(model),
        use_folds=(0,),
        perform_everything_on_gpu=False,
        num_processes_preprocessing=1,
        num_processes_segmentation_export=1,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
