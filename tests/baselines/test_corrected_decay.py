"""Corrected decay: the matrices that are followed by a normalization, and timm's implementation."""

from __future__ import annotations

import pytest
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import Tensor, nn

from nnunet_cpr.baselines import CorrectedDecay
from nnunet_cpr.cpr.regularized_parameters import regularized

NNUNET = {
    "input_channels": 1,
    "n_stages": 3,
    "features_per_stage": (4, 8, 8),
    "conv_op": nn.Conv3d,
    "kernel_sizes": 3,
    "strides": (1, 2, 2),
    "num_classes": 2,
    "n_conv_per_stage_decoder": (1, 1),
    "conv_bias": True,
    "norm_op": nn.InstanceNorm3d,
    "norm_op_kwargs": {"affine": True},
    "nonlin": nn.LeakyReLU,
}


def normalized(model: nn.Module) -> list[str]:
    return CorrectedDecay(model).normalized


def test_convolution_blocks_of_nnunet_are_normalized() -> None:
    settings = {**NNUNET, "deep_supervision": True, "dropout_op": nn.Dropout3d}
    settings["dropout_op_kwargs"] = {"p": 0.1}
    for model in (
        PlainConvUNet(n_conv_per_stage=(1, 1, 1), **settings),
        ResidualEncoderUNet(n_blocks_per_stage=(1, 2, 1), **settings),
    ):
        expected = [n for n in regularized(model) if "seg_layers" not in n and "transpconvs" not in n]
        assert normalized(model) == expected and len(expected) >= 5


class Graph(nn.Module):
    """Layers whose results go several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.direct, self.reshaped, self.added, self.branched, self.activated, self.shared, self.last = (
            nn.Linear(4, 4) for _ in range(7)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.direct(x))
        y = self.reshaped(x)
        x = self.norm(y.view(y.shape[0], 4))
        x = self.norm(x + self.added(x))
        y = self.branched(x)
        x = self.norm(y) + y
        x = self.norm(torch.relu(self.activated(x)))
        x = self.norm(self.shared(x))
        return self.last(self.shared(x))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)) if x.sum() > 0 else x


def test_every_use_of_a_result_must_be_a_normalization() -> None:
    assert normalized(Graph()) == ["direct.weight", "reshaped.weight"]


def test_children_of_a_module_that_cannot_be_traced_are() -> None:
    assert normalized(Untraceable()) == ["block.0.weight"]


def test_matrices_can_be_named() -> None:
    model = Graph()
    named = CorrectedDecay(list(model.named_parameters()), normalized=["last.weight", "added.weight"])
    assert named.normalized == ["added.weight", "last.weight"]
    with pytest.raises(ValueError, match="normalized: expected names of matrices, got 'x'"):
        CorrectedDecay(model, normalized=["x", "last.weight"])
    with pytest.raises(
        ValueError, match="normalized: expected names of matrices, got None; or give a module"
    ):
        CorrectedDecay(model.parameters())
