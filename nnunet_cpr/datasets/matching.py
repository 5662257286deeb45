"""Images and segmentations on the disk: the files, the names of their cases, and the pairs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nnunet_cpr.datasets import formats
from nnunet_cpr.refusals import Refusal

_DIGITS = "0123456789"
_SHOWN = 3
"""Number of names in an error."""


class Found(NamedTuple):
    """Images in a folder, or those of a pattern such as ``kits/*/imaging.nii.gz``.

    Attributes:
        root: the folder, or the last one before the wildcards of the pattern.
        images: files, and folders of DICOM slices.
        others: everything else.
    """

    root: Path
    images: list[Path]
    others: list[Path]


def find(source: Path) -> Found:
    """Find the images in a folder, also through symbolic links, or those of a pattern.

    Raises:
        Refusal: there is no image, or two paths lead to the same one.
    """
    root = source
    while not root.is_dir():
        root = root.parent
    is_folder = root == source
    if is_folder and formats.slices(root):
        raise Refusal(f"{source}: expected images, DICOM in a folder each, got the slices of one")
    paths = root.iterdir() if is_folder else root.glob(str(source.relative_to(root)))
    found, rest = _sort(paths)
    parts = {part for path in found for part in formats.parts(path)}
    # A pattern with ** has files once more with their folder.
    images, others = (
        [path for path in dict.fromkeys(each) if path not in parts] for each in (found, rest)
    )
    if not images:
        raise Refusal(f"{source}: expected images, DICOM in a folder each, got none")
    targets: dict[Path, Path] = {}
    for path in images:
        if (other := targets.setdefault(path.resolve(), path)) != path:
            raise Refusal(
                f"{path}: expected each image once, got it as {other}, too",
                "remove the link, as one patient must not be two cases",
            )
    return Found(root, images, others)


def _sort(paths: Iterable[Path], beside_slices: bool = False) -> tuple[list[Path], list[Path]]:
    """Return the images of paths and below them, and everything else.

    A folder of DICOM slices is an image, and no other file in it is one.
    """
    images, others = [], []
    for path in sorted(paths):
        is_loop = path.is_symlink() and path.parent.resolve().is_relative_to(path.resolve())
        if path.name.startswith(".") or is_loop or not path.exists():
            others.append(path)
        elif path.is_dir():
            slices = formats.slices(path)
            found, rest = _sort(set(path.iterdir()) - slices, beside_slices=bool(slices))
            images += [path, *found] if slices else found
            others += rest
        else:
            (others if beside_slices or not formats.is_image(path) else images).append(path)
    return images, others


class Matching(NamedTuple):
    """Cases of the images, segmentations, and their pairs.

    Attributes:
        images: files of each case by channel; there should be one of each.
        labels: segmentations by their names.
        pairs: name of the segmentation of each case that has one.
    """

    images: dict[str, dict[int, list[Path]]]
    labels: dict[str, Path]
    pairs: dict[str, str]


def match(images: Found, labels: Found, endings: Sequence[str], pattern: str | None) -> Matching:
    """Match images and segmentations by the names of their cases.

    If some names end with one of several channels, all others are left out. Else an ending such as
    ``_0001`` is the number of a channel, as in nnU-Net's names, unless more segmentations have an image
    if it is not: then it belongs to the case, as in ``amos_0001``.

    Args:
        images: images, none of them a segmentation.
        labels: segmentations.
        endings: ending of the names of each channel.
        pattern: regular expression of the part of a path that names the case. Paths without it are left
            out.

    Raises:
        Refusal: two segmentations have the same name.
    """
    of_images, of_labels = _without_file_endings(images), _without_file_endings(labels)
    matchings = [_match(reading, of_labels, pattern) for reading in _read_channels(of_images, endings)]
    return max(matchings, key=lambda each: len(each.pairs))  # the first of equal ones


def find_cases(
    images: Found, channels: Sequence[str], has_colors: bool = False
) -> dict[str, list[Path]]:
    """Return the files of each case of images without segmentations, one for each channel.

    A number such as ``_0001`` that is not one of a channel belongs to the case, as in ``amos_0001``.

    Args:
        images: the images, each of which has to belong to a case.
        channels: names of the channels, with which the names of several may end, as in :func:`match`.
        has_colors: a file may have all channels, such as the colors of a PNG.

    Raises:
        Refusal: an image is not one of a case with one file for each channel.
    """
    plain = _without_file_endings(images)
    reading = next(_read_channels(plain, channels))
    known = {case for case, number in reading.values() if number < len(channels)}
    for path, (case, number) in reading.items():
        if number >= len(channels) and case not in known:
            reading[path] = plain[path], 0
    numbers = [*range(len(channels))]
    accepted = [numbers, [0]] if has_colors else [numbers]
    cases = {
        case: [path for n in sorted(files) for path in files[n]]
        for case, files in _match(reading, {}, None).images.items()
        if sorted(files) in accepted and all(len(paths) == 1 for paths in files.values())
    }
    taken = {path for paths in cases.values() for path in paths}
    if wrong := [path.name for path in images.images if path not in taken]:
        numbered = " and ".join(f"CASE_{number:04d}" for number in numbers)
        named = " and ".join(f"CASE_{channel}" for channel in channels) if numbers[1:] else "CASE"
        raise Refusal(
            f"{images.root}: expected {numbered}, or {named}, of each case, got "
            f"{', '.join(wrong[:_SHOWN])}",
            "rename or move them, or give a pattern of the others",
        )
    return cases


def _without_file_endings(found: Found) -> dict[Path, str]:
    """Return each path below the root without file ending, such as ``patient 1/ct``."""
    ending = re.compile(r"(\.\w+)?\.gz$|\.\w+$", re.IGNORECASE)
    names = {path: path.relative_to(found.root).as_posix() for path in found.images}
    return {path: name if path.is_dir() else ending.sub("", name) for path, name in names.items()}


def _read_channels(
    images: dict[Path, str], endings: Sequence[str]
) -> Iterator[dict[Path, tuple[str, int]]]:
    """Yield case and channel of each image, in each way to read their names."""
    named = {
        path: (matched[1], endings.index(ending))
        for ending in sorted(endings, key=len)  # the longer one decides if both match
        for path, name in images.items()
        if (matched := re.fullmatch(rf"(.+)[-_. /]{re.escape(ending)}", name, re.IGNORECASE))
    }
    if named and len(endings) > 1:
        yield named
        return
    plain = {path: (name, 0) for path, name in images.items()}
    numbered = {path: re.fullmatch("(.+)_([0-9]{4})", name) for path, name in images.items()}
    numbers = {path: (matched[1], int(matched[2])) for path, matched in numbered.items() if matched}
    yield {**plain, **numbers, **named}
    yield {**plain, **named}


def _match(
    images: dict[Path, tuple[str, int]], labels: dict[Path, str], pattern: str | None
) -> Matching:
    """Match images, each with a channel, and segmentations."""
    case_of = _name_cases({name for name, _ in images.values()}, {*labels.values()}, pattern)
    cases: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path, (name, channel) in images.items():
        if name in case_of:
            cases[case_of[name]][channel].append(path)
    named: dict[str, Path] = {}
    for path, name in labels.items():
        if name in case_of and (other := named.setdefault(case_of[name], path)) != path:
            raise Refusal(
                f"{case_of[name]}: expected one segmentation, got {other} and {path}", "move one away"
            )
    pairs = {case: case for case in cases if case in named}
    return Matching(cases, named, pairs if pairs or pattern else _pair(cases, named))


def _name_cases(images: Collection[str], labels: Collection[str], pattern: str | None) -> dict[str, str]:
    """Return the case of each path, by one rule for images and segmentations.

    It is what the pattern finds, or else the path up to the last folder in which there is more than one
    image or more than one segmentation.
    """
    if pattern:
        found = {name: re.search(pattern, name) for name in (*images, *labels)}
        cases = {name: matched[matched.lastindex or 0] for name, matched in found.items() if matched}
        return {name: case.replace("/", "_") for name, case in cases.items() if case}
    crowded = set()
    for names in (images, labels):
        paths = {path for name in names for path in (PurePosixPath(name), *PurePosixPath(name).parents)}
        crowded |= {folder for folder, n in Counter(path.parent for path in paths).items() if n > 1}
    cases = {}
    for name in (*images, *labels):
        path = PurePosixPath(name)
        while path.parent.name and path.parent not in crowded:
            path = path.parent
        cases[name] = "_".join(path.parts)
    return cases


def _pair(cases: Collection[str], labels: Collection[str]) -> dict[str, str]:
    """Return the label of each case, by names without what all of their kind begin and end with.

    Example:
        >>> _pair(["volume-1", "volume-2"], ["segmentation-2", "segmentation-1"])
        {'volume-1': 'segmentation-1', 'volume-2': 'segmentation-2'}
    """
    case_of, label_of = _by_key(cases), _by_key(labels)
    return {case: label_of[key] for key, case in case_of.items() if key in label_of}


def _by_key(names: Collection[str]) -> dict[str, str]:
    """Return names by themselves without what all begin and end with, except for digits.

    A single name has no others to be compared with and is taken as it is.
    """
    if len(names) == 1:
        return {name: name for name in names}
    start = len(_common(names).rstrip(_DIGITS))
    end = len(_common([name[start:][::-1] for name in names]).rstrip(_DIGITS))
    return {name[start : len(name) - end]: name for name in names}


def _common(names: Collection[str]) -> str:
    """Return what all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda each: len({*each}) == 1, zip(*names)))
