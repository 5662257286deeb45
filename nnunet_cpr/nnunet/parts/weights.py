"""Weights that a training begins with: pretrained ones, and those that are frozen."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from nnunetv2.run.load_pretrained_weights import load_pretrained_weights
from torch import Tensor, nn

from nnunet_cpr.nnunet.fold_files import PRETRAINED
from nnunet_cpr.nnunet.parts.part import Part, unwrapped
from nnunet_cpr.refusals import Refusal, one_line

_NOT_LOADED = ".seg_layers."
"""Part of the names of weights that nnU-Net does not load, those of the segmentation heads."""


def given_weights(arguments: Sequence[str] | None = None) -> Path | None:
    """Return the file of ``-pretrained_weights`` in nnU-Net's command, None without it.

    It is checked before nnU-Net loads it, so that a mistake costs a line.

    Args:
        arguments: arguments of the command; None for those of this process.

    Example:
        >>> given_weights(["4", "3d_fullres", "0", "-p", "nnUNetPlans"]) is None
        True
        >>> given_weights(["4", "2d", "0", "-pretrained_weights", "/tmp/final.pth"]).name
        'final.pth'
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-pretrained_weights", nargs="?")
    parser.add_argument("-p", nargs="?")  # otherwise an abbreviation
    known, _ = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    return None if known.pretrained_weights is None else Path(known.pretrained_weights).absolute()


@functools.cache
def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def misfit(network: Mapping[str, Tensor], weights: Mapping[str, Any]) -> str | None:
    """Return why pretrained weights do not fit a network by nnU-Net's rule, None if they do.

    Args:
        network: the network's ``state_dict``; its values are not read.
        weights: ``network_weights`` of a checkpoint. Segmentation heads may differ or be missing.

    Example:
        >>> misfit({"a": torch.ones(2), "x.seg_layers.0": torch.ones(1)}, {"a": torch.ones(3)})
        'a: expected shape (2,), got (3,)'
    """
    for name, value in network.items():
        if _NOT_LOADED in name:
            continue
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != value.shape:
            return f"{name}: expected shape {tuple(value.shape)}, got {tuple(weights[name].shape)}"
    return None


class Weights(Part):
    """Pretrained weights, which are recorded, and the part of the network that is not trained.

    nnU-Net has one folder for a trainer, whatever the training began with. The suffix ``_pre<Word>``
    gives fine-tuned trainings a folder of their own, and begins only with pretrained weights.
    """

    _given: Path | None = None

    def before(self, arguments: dict[str, Any]) -> None:
        self._loads: list[None] = []  # one entry each time that weights are loaded into the network
        self._frozen: dict[str, float] = {}  # sums of the part that is frozen, before it was loaded

    def begin(self) -> None:
        self._given = given_weights()
        if self._given is None:
            return
        if self.parts.saves.continues:
            raise Refusal(
                "--c continues with the weights of the checkpoint",
                "leave -pretrained_weights out, or leave --c out to begin anew",
            )
        if not self._given.is_file():
            raise Refusal(f"-pretrained_weights: expected a checkpoint, got no file {self._given}")

    def initialized(self) -> None:
        network = unwrapped(self.trainer.network)
        _record_loads(network, self.trainer.my_init_kwargs, self._loads)
        if self._given is None:
            return
        try:  # as nnU-Net, which loads whatever the file has
            weights = torch.load(self._given, map_location="cpu", weights_only=False)["network_weights"]
        except Exception as error:  # a damaged file can fail in any way
            text = f"{type(error).__name__}: {one_line(error)}"
            raise Refusal(f"{self._given} cannot be read as a checkpoint of nnU-Net: {text}") from error
        if reason := misfit(network.state_dict(), weights):
            plans, configuration = self.trainer.plans_manager.plans_name, self.trainer.configuration_name
            raise Refusal(
                f"{self._given} does not fit the network of {plans}, {configuration}: {reason}",
                "fine-tune with the plans of the weights",
            )

    def freeze(self) -> None:
        """Exclude the part of the network that the name gives from the training."""
        part = self.trainer.settings.freeze
        if part is None:
            return
        network = unwrapped(self.trainer.network)
        if not isinstance(frozen := getattr(network, part, None), nn.Module):
            parts = ", ".join(name for name, _ in network.named_children())
            raise Refusal(
                f"{self.name}: expected a network with a part {part!r}, got "
                f"{type(network).__name__} with {parts or 'none'}; leave _freeze{part} out"
            )
        frozen.requires_grad_(False)
        self._frozen = self._frozen or _sums(frozen)

    def check(self) -> None:
        word = self.trainer.settings.pretrained
        if word is not None and PRETRAINED not in self.trainer.my_init_kwargs:
            raise Refusal(
                f"{self.name}: expected pretrained weights, as _pre{word} says, got none",
                "give -pretrained_weights CHECKPOINT, without --c",
            )

    def start(self) -> None:
        part = self.trainer.settings.freeze
        if part is not None and not self._loads:  # perhaps into the part alone
            frozen = getattr(unwrapped(self.trainer.network), part)
            if _sums(frozen) == self._frozen:
                raise Refusal(
                    f"{self.name}: _freeze{part} would keep the random weights of the {part}",
                    "give -pretrained_weights CHECKPOINT, without --c, or leave the suffix out",
                )
        if record := self.trainer.my_init_kwargs.get(PRETRAINED):
            self.log(f"Began with pretrained weights {record['path']}, SHA-256 {record['sha256']}")
        if self.trainer.settings.freeze is not None:
            self.log(f"Training {_describe_frozen(self.trainer.network)}")

    def differences(self, checkpoint: dict[str, Any]) -> Iterator[str]:
        if self.trainer.settings.pretrained is not None and PRETRAINED not in checkpoint["init_args"]:
            yield "without pretrained weights"

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self._loads.append(None)
        if record := checkpoint["init_args"].get(PRETRAINED):  # which another method may not restore
            self.trainer.my_init_kwargs[PRETRAINED] = record


def _record_loads(network: nn.Module, record: dict[str, Any], loads: list[None]) -> None:
    """Record that weights are loaded, and path and SHA-256 of those that nnU-Net begins with.

    Its function is given the network and the file, by its command or by a script, and tells nobody.

    Args:
        network: the network, without wrappers.
        record: dictionary to which the entry is added.
        loads: list that gets an entry each time.
    """

    def record_load(*_: Any) -> None:
        loads.append(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is load_pretrained_weights.__code__:
                path = Path(frame.f_locals["fname"]).absolute()
                record[PRETRAINED] = {"path": str(path), "sha256": sha256(path)}
                return
            frame = frame.f_back

    # A function, which copies of the network share, in place of a method, whose object they would copy.
    network.register_load_state_dict_post_hook(record_load)


def _sums(part: nn.Module) -> dict[str, float]:
    return {name: float(value.double().sum()) for name, value in part.state_dict().items()}


def _describe_frozen(network: nn.Module) -> str:
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return f"{trained:,} of {total:,} parameters; the others keep their weights"
