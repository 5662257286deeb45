"""Names and shapes of the parameters of real networks, without weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Shapes = list[tuple[str, tuple[int, ...]]]


def _shapes(module: nn.Module) -> Shapes:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


_UNET = {
    "input_channels": 1,
    "n_stages": 6,
    "features_per_stage": (32, 64, 128, 256, 320, 320),
    "conv_op": nn.Conv3d,
    "kernel_sizes": 3,
    "strides": (1, 2, 2, 2, 2, 2),
    "num_classes": 3,
    "conv_bias": True,
    "norm_op": nn.InstanceNorm3d,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin": nn.LeakyReLU,
    "deep_supervision": True,
}


def unet() -> Shapes:
    """Return the shapes of nnU-Net's 3d_fullres network with six stages."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return _shapes(PlainConvUNet(**_UNET, n_conv_per_stage=2, n_conv_per_stage_decoder=2))


def resenc_l() -> Shapes:
    """Return the shapes of the network of nnU-Net's ResEnc-L plans."""
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    return _shapes(
        ResidualEncoderUNet(
            **_UNET, n_blocks_per_stage=(1, 3, 4, 6, 6, 6), n_conv_per_stage_decoder=(1,) * 5
        )
    )


def resnet18() -> Shapes:
    """Return the shapes of torchvision's ResNet-18."""
    import torchvision

    return _shapes(torchvision.models.resnet18())


def deit_s() -> Shapes:
    """Return the shapes of timm's DeiT-S."""
    import timm

    return _shapes(timm.create_model("deit_small_patch16_224"))


def gpt2() -> Shapes:
    """Return the shapes of GPT-2 small with tied embeddings."""
    width, layers = 768, 12
    shapes: Shapes = [("wte.weight", (50257, width)), ("wpe.weight", (1024, width))]
    for i in range(layers):
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes += [(f"h.{i}.{name}.weight", (rows, columns)), (f"h.{i}.{name}.bias", (columns,))]
        for norm in ("ln_1", "ln_2"):
            shapes += [(f"h.{i}.{norm}.{part}", (width,)) for part in ("weight", "bias")]
    return shapes + [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]


def uniform(total: int, tensors: int) -> Shapes:
    """Return the shapes of square matrices with about ``total`` elements in all.

    Example:
        >>> uniform(200, 2)
        [('0.weight', (10, 10)), ('1.weight', (10, 10))]
    """
    side = max(1, round((total / tensors) ** 0.5))
    return [(f"{i}.weight", (side, side)) for i in range(tensors)]


NETWORKS: dict[str, Callable[[], Shapes]] = {
    "nnU-Net": unet,
    "nnU-Net ResEnc-L": resenc_l,
    "ResNet-18": resnet18,
    "DeiT-S": deit_s,
    "GPT-2 small": gpt2,
}


def build(name: str) -> Shapes:
    """Return the shapes of one of :data:`NETWORKS` without allocating its weights."""
    with torch.device("meta"):
        return NETWORKS[name]()


def elements(shapes: Shapes) -> int:
    """Return the number of parameters."""
    return sum(torch.Size(shape).numel() for _, shape in shapes)
