"""Networks of nnU-Net's plans, without their values."""

from __future__ import annotations

from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import Tensor

from nnunet_cpr.nnunet.composition import find_trainer


def network_shapes(
    trainer: str, plans: dict[str, Any], dataset: dict[str, Any], configuration: str
) -> dict[str, Tensor] | None:
    """Return the ``state_dict`` of the network that a trainer builds, without memory for its values.

    Args:
        trainer: class name of the trainer.
        plans: content of nnU-Net's plans.
        dataset: content of ``dataset.json``.
        configuration: one of the plans' configurations.

    Returns:
        The weights by name; None for a trainer with a network of its own, which only a training builds.
    """
    if find_trainer(trainer).build_network_architecture is not nnUNetTrainer.build_network_architecture:
        return None
    manager = PlansManager(plans)
    chosen = manager.get_configuration(configuration)
    with torch.device("meta"):
        network = get_network_from_plans(
            chosen.network_arch_class_name,
            chosen.network_arch_init_kwargs,
            chosen.network_arch_init_kwargs_req_import,
            determine_num_input_channels(manager, chosen, dataset),
            manager.get_label_manager(dataset).num_segmentation_heads,
            deep_supervision=True,
        )
    return dict(network.state_dict())
