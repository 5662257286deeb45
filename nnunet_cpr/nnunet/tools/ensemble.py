"""Prediction with the folds and seeds of a trainer, averaged as nnU-Net's own commands average them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.inference.export_prediction import (
    convert_predicted_logits_to_segmentation_with_correct_shape as convert,
)
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.postprocessing.remove_connected_components import apply_postprocessing
from nnunetv2.utilities.label_handling.label_handling import convert_labelmap_to_one_hot

from nnunet_cpr.files import atomic_write


class EnsemblePredictor:
    """Models with the same plans, one for each seed.

    Logits are averaged over the folds of a model, as by ``nnUNetv2_predict``, and probabilities over the
    models, as by ``nnUNetv2_ensemble``. Nothing but segmentations is written.

    Args:
        models: folders of the models in ``nnUNet_results``.
        folds: folds of each of them.
        device: where the networks run.
        postprocessing: ``postprocessing.pkl`` of nnU-Net, None without one.
    """

    def __init__(
        self,
        models: Sequence[Path],
        folds: Sequence[int],
        device: torch.device,
        postprocessing: Path | None = None,
    ) -> None:
        self._weights: list[list[dict[str, torch.Tensor]]] = []
        with redirect_stdout(io.StringIO()):  # nnU-Net's advice for GPUs
            self._predictor = nnUNetPredictor(device=device, allow_tqdm=False)
            for model in models:
                self._predictor.initialize_from_trained_model_folder(str(model), tuple(folds))
                self._weights.append(self._predictor.list_of_parameters)
        self._postprocessing = (
            ([], []) if postprocessing is None else pickle.loads(postprocessing.read_bytes())
        )

    def predict(self, images: Sequence[Path], segmentation: Path, previous: Path | None = None) -> None:
        """Segment a case and write the file atomically.

        Args:
            images: a file for each channel.
            segmentation: file to write.
            previous: segmentation of a cascade's previous stage, None without one.
        """
        data, properties = self._preprocess(images, previous)
        found = apply_postprocessing(self._average(data, properties), *self._postprocessing)
        with atomic_write(segmentation) as temporary:
            # The format is taken from the whole ending, such as .nii.gz.
            complete = temporary.with_name(temporary.name + self._predictor.dataset_json["file_ending"])
            writer = self._predictor.plans_manager.image_reader_writer_class()
            writer.write_seg(found, str(complete), properties)
            complete.replace(temporary)

    def _preprocess(
        self, images: Sequence[Path], previous: Path | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        used, configuration = self._predictor, self._predictor.configuration_manager
        data, segmentation, properties = configuration.preprocessor_class(verbose=False).run_case(
            [str(path) for path in images],
            None if previous is None else str(previous),
            *(used.plans_manager, configuration, used.dataset_json),
        )
        if previous is not None:
            labels = used.label_manager.foreground_labels
            data = np.vstack((data, convert_labelmap_to_one_hot(segmentation[0], labels, data.dtype)))
        return torch.from_numpy(data), properties

    def _average(self, data: torch.Tensor, properties: dict[str, Any]) -> np.ndarray:
        """Return the segmentation in the geometry of the images."""
        used = self._predictor
        total: Any = 0
        about = (used.plans_manager, used.configuration_manager, used.label_manager, properties)
        for used.list_of_parameters in self._weights:
            logits = used.predict_logits_from_preprocessed_data(data)
            if len(self._weights) == 1:
                return convert(logits, *about)
            _, probabilities = convert(logits, *about, return_probabilities=True)
            total = total + probabilities
        return used.label_manager.convert_probabilities_to_segmentation(total / len(self._weights))
