"""Cases that pretrained weights were trained on, known by data set and id or by equal images."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from nnunet_cpr.files import read_json
from nnunet_cpr.nnunet.run_record import read_record

Signature = tuple[int, bytes]
"""Size of an image and its checksum, as far as they are known without reading it."""


def describe_origin(path: Path, sha256: str, dataset: str, validated: Collection[str]) -> dict[str, Any]:
    """Return the entry ``weights`` of the record of a run that begins with pretrained weights.

    Args:
        path: nnU-Net's checkpoint; its fold's record tells what it was trained on.
        sha256: its SHA-256.
        dataset: name of the run's data set.
        validated: ids of the cases that the run validates.

    Returns:
        ``path`` and ``sha256``; with a record also ``dataset``, ``trained_on`` (ids of its cases) and
        ``seen`` (those of ``validated`` that are among them).
    """
    weights: dict[str, Any] = {"path": str(path), "sha256": sha256}
    record = read_record(path.parent)
    if record is None or not record.split:
        return weights
    before = record.weights or {}  # which have seen cases, too
    origins = [(record.dataset, record.split["train"])]
    origins += [(before["dataset"], before["trained_on"])] if "trained_on" in before else []
    seen = {*validated}.intersection(chain(*(_same(dataset, *each) for each in origins)))
    trained_on = {*chain(*(cases for origin, cases in origins if origin == record.dataset))}
    return weights | {
        "dataset": record.dataset,
        "trained_on": sorted(trained_on),
        "seen": sorted(seen),
    }


def _same(dataset: str, other: str, cases: Collection[str]) -> Iterator[str]:
    """Yield the cases of a data set that are cases of another one, or have an image of one."""
    if dataset == other:
        yield from cases
        return
    raw = Path(os.environ.get("nnUNet_raw") or os.devnull)
    own, others = _images(raw / dataset), _images(raw / other)
    by_signature: dict[Signature, list[Path]] = defaultdict(list)
    for image in chain(*(others.get(case, ()) for case in cases)):
        by_signature[_signature(image)].append(image)
    for case, images in own.items():
        alike = ((one, each) for one in images for each in by_signature.get(_signature(one), ()))
        if any(_content(one) == _content(each) for one, each in alike):
            yield case


@functools.cache
def _images(dataset: Path) -> Mapping[str, list[Path]]:
    """Return the images of each case of a raw data set, none if they are not on this machine."""
    from nnunetv2.utilities.utils import get_filenames_of_train_images_and_targets  # imports torch

    with suppress(OSError, ValueError, LookupError):
        described = read_json(dataset / "dataset.json")
        found = get_filenames_of_train_images_and_targets(str(dataset), described)
        return {case: [*map(Path, files["images"])] for case, files in found.items()}
    return {}


@functools.cache
def _signature(image: Path) -> Signature:
    """Return the size of an image, of a gzip file the uncompressed one and its checksum."""
    with suppress(OSError), image.open("rb") as file:
        if image.suffix != ".gz":
            return file.seek(0, os.SEEK_END), b""
        file.seek(-8, os.SEEK_END)
        end = file.read()
        return int.from_bytes(end[4:], "little"), end[:4]
    return -1, str(image).encode()  # equal to no other


@functools.cache
def _content(image: Path) -> str:
    """Return the SHA-256 of an image, uncompressed."""
    digest = hashlib.sha256()
    with gzip.open(image) if image.suffix == ".gz" else image.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
