"""nnU-Net's trainer for studies on a CPU, in half of the time."""

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerFastCPU(nnUNetTrainer):
    """nnU-Net with bfloat16 on the CPU, short epochs and no mirroring at inference.

    As on a GPU, layers compute with automatic mixed precision, and weights, loss and optimizer stay in
    float32. nnU-Net itself uses mixed precision on GPUs only.
    """

    def initialize(self):
        self.num_val_iterations_per_epoch = 10
        super().initialize()

    @staticmethod
    def build_network_architecture(
        plans_manager,
        configuration_manager,
        num_input_channels,
        num_output_channels,
        enable_deep_supervision=True,
    ):
        network = nnUNetTrainer.build_network_architecture(
            plans_manager,
            configuration_manager,
            num_input_channels,
            num_output_channels,
            enable_deep_supervision,
        )
        if len(configuration_manager.patch_size) == 3:
            network = network.to(memory_format=torch.channels_last_3d)
        else:
            network = network.to(memory_format=torch.channels_last)
        forward = network.forward

        def forward_in_bfloat16(x):
            with torch.autocast("cpu", torch.bfloat16):
                output = forward(x)
            return [y.float() for y in output] if isinstance(output, list) else output.float()

        network.forward = forward_in_bfloat16
        return network

    def configure_rotation_dummyDA_mirroring_and_inital_patch_size(self):
        found = super().configure_rotation_dummyDA_mirroring_and_inital_patch_size()
        self.inference_allowed_mirroring_axes = None
        return found
