"""Networks that trainers build from nnU-Net's plans."""

from __future__ import annotations

import inspect
from typing import Any

from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import Tensor

from nnunet_cpr.nnunet.composition import find_trainer


def network_shapes(
    trainer: str, plans: dict[str, Any], dataset: dict[str, Any], configuration: str
) -> dict[str, Tensor] | None:
    """Return the ``state_dict`` of the network that a trainer builds, with random values.

    Args:
        trainer: class name of the trainer.
        plans: content of nnU-Net's plans.
        dataset: content of ``dataset.json``.
        configuration: one of the plans' configurations.

    Returns:
        The weights by name; None if the trainer of another package cannot build its network here.
    """
    build = find_trainer(trainer).build_network_architecture
    manager = PlansManager(plans)
    chosen = manager.get_configuration(configuration)
    described: tuple[Any, ...] = (manager, chosen)
    if "plans_manager" not in inspect.signature(build).parameters:  # nnU-Net's older signature
        described = (
            chosen.network_arch_class_name,
            chosen.network_arch_init_kwargs,
            chosen.network_arch_init_kwargs_req_import,
        )
    channels = determine_num_input_channels(manager, chosen, dataset)
    heads = manager.get_label_manager(dataset).num_segmentation_heads
    try:
        network = build(*described, channels, heads, True)  # with deep supervision
    except Exception:  # it can fail in any way, such as without a GPU; its training checks the weights
        return None
    return dict(network.state_dict())
