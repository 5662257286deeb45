"""Images and segmentations of one's own, in two folders, matched by their names."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from rich.table import Column, Table

from nnunet_cpr.datasets import formats
from nnunet_cpr.datasets.archive import Archive, Case, CheckedCase, DataSet
from nnunet_cpr.datasets.raw import write_cases
from nnunet_cpr.refusals import Refusal

_DIGITS = "0123456789"
_SHOWN = 10
"""Number of cases in the table."""


@dataclass
class OwnFolder(DataSet):
    """A folder of images, which is the source, and one of segmentations.

    Attributes:
        labels: folder of the segmentations.
        channels: names of the channels. If there are several, the names of the files end with them, or
            with nnU-Net's ``_0000``.
        label_names: names of the values of the segmentations above 0, in ascending order.
        named: the values of the segmentations with their names, after :meth:`name_labels`.
        left_out: names of what is in both folders and no case has, after :meth:`open`.
        without_spacing: names of the TIFF images without a file with their spacing, after :meth:`open`.
    """

    number = 501

    labels: Path
    name: str
    channels: Sequence[str] = ()
    label_names: Sequence[str] = ()
    named: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    without_spacing: list[str] = field(default_factory=list)

    def open(self, source: Path) -> Archive:
        images: dict[str, dict[int, Path]] = defaultdict(dict)
        found, of_images = _find_images(source)
        labels, of_labels = _find_images(self.labels)
        for folder, paths, others in ((source, found, of_images), (self.labels, labels, of_labels)):
            unknown = filter(formats.lacks_spacing, paths.values())
            self.left_out += [str(path.relative_to(folder.parent)) for path in others]
            self.without_spacing += [str(path.relative_to(folder.parent)) for path in unknown]
        for name, path in found.items():
            case, channel = self._split_channel(name)
            if (other := images[case].setdefault(channel, path)) != path:
                raise Refusal(f"{case}: expected one file a channel, got {other} and {path}")
        files = {path.resolve() for path in found.values()}
        if both := sorted(files.intersection(path.resolve() for path in labels.values())):
            raise Refusal(
                f"{both[0]}: expected images and segmentations in two folders, got this file in both",
                "move the segmentations to a folder of their own",
            )
        expected = list(range(len(self.channels) or max(map(len, images.values()))))
        for case, by_channel in images.items():
            if sorted(by_channel) != expected:
                raise Refusal(
                    f"{case}: expected the channels {expected}, got {sorted(by_channel)}",
                    "name them as the files end, such as --channels T1,T2 for a_T1.nrrd and a_T2.nrrd",
                )
        cases = [
            Case(case, tuple(images[case][channel] for channel in expected), labels[label])
            for case, label in sorted(_match(images, labels).items())
        ]
        return Archive(source, cases, range(256), advice="mend the file, or move the case away")

    def _split_channel(self, name: str) -> tuple[str, int]:
        """Return the case and the channel of an image."""
        for index, channel in enumerate(self.channels):
            if matched := re.fullmatch(rf"(.+)[-_. ]{re.escape(channel)}", name, re.IGNORECASE):
                return matched[1], index
        matched = re.fullmatch(r"(.+)_([0-9]{4})", name)
        return (matched[1], int(matched[2])) if matched else (name, 0)

    def name_labels(self, checked: Sequence[CheckedCase]) -> None:
        """Name the values that the segmentations have.

        Raises:
            Refusal: the number of names is another one.
        """
        values = sorted(set().union(*(each.label_values for each in checked)) - {0})
        names = self.label_names or [f"label {value}" for value in values]
        if len(names) != len(values):
            expected = f"a name for each of the values {values}"
            raise Refusal(f"--label-names: expected {expected}, got {len(names)}")
        self.named = {0: "background", **dict(zip(values, names))}

    def describe(self, archive: Archive, checked: Sequence[CheckedCase]) -> Iterator[Table | str]:
        """Yield a table of the first cases, and the values of all."""
        titles = ("image", "label", "size", "mm", "values")
        table = Table(*(Column(title, overflow="fold") for title in titles), box=None)
        for case, result in list(zip(archive.cases, checked))[:_SHOWN]:
            *images, label = (path.name for path in (*case.images, case.label) if path)
            spacing = [f"{side:.3g}" for side in result.spacing]
            numbers = (result.size, spacing, sorted(result.label_values))
            table.add_row("\n".join(images), label, *(" ".join(map(str, each)) for each in numbers))
        yield table
        if len(checked) > _SHOWN:
            yield f"and {len(checked) - _SHOWN} more"
        if self.left_out:
            yield f"left out (no image, hidden, or a link to nowhere): {', '.join(self.left_out)}"
        if self.without_spacing:
            yield (
                'voxels of 1 mm, as nnU-Net assumes without a.json with {"spacing": [z, y, x]} beside '
                f"a.tif: {', '.join(self.without_spacing)}"
            )
        for new, (value, name) in enumerate(self.named.items()):
            yield f"value {value}: {name}" + ("" if new == value else f", becomes {new}")

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        from nnunetv2.experiment_planning.verify_dataset_integrity import verify_dataset_integrity

        new_values = {value: new for new, value in enumerate(self.named)}
        labels = {name: new for new, name in enumerate(self.named.values())}
        write_cases(archive, folder, processes, self.channels, new_values, labels=labels)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                verify_dataset_integrity(str(folder), processes)
        except (AssertionError, RuntimeError) as error:
            raise Refusal(f"{folder.name}: refused by nnU-Net: {error}") from error


def _find_images(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the images in a folder by their names, and all other files.

    A name is the path without file ending, or its first part if that has one image only.

    Raises:
        Refusal: there is no image, or two have the same name.
    """
    paths, others = _list_files(folder)
    if not paths or folder in paths:
        got = "the slices of one" if paths else "none"
        raise Refusal(f"{folder}: expected images, DICOM in a folder each, got {got}")
    targets: dict[Path, Path] = {}
    for path in paths:
        if (other := targets.setdefault(path.resolve(), path)) != path:
            raise Refusal(
                f"{path}: expected each image once, got it as {other}, too",
                "remove the link, as one patient must not be two cases",
            )
    firsts = Counter(path.relative_to(folder).parts[0] for path in paths)
    images: dict[str, Path] = {}
    for path in paths:
        parts = path.relative_to(folder).parts
        name = parts[0] if firsts[parts[0]] == 1 else "_".join(parts)
        if path.is_file() and name.endswith(path.name):
            name = re.sub(r"(\.\w+)?\.gz$|\.\w+$", "", name)
        if (other := images.setdefault(name, path)) != path:
            raise Refusal(f"{name}: expected one file, got {other} and {path}", "move one away")
    spacings = {formats.spacing_file(path) for path in paths}
    return images, [path for path in others if path not in spacings]


def _list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images in a folder, also through symbolic links, and everything else.

    A folder of DICOM slices is an image.
    """
    slices = formats.slices(folder)
    images, others = [folder] if slices else [], []
    for path in sorted(folder.iterdir()):
        is_loop = path.is_symlink() and folder.resolve().is_relative_to(path.resolve())
        if path.name.startswith(".") or is_loop or not path.exists():
            others.append(path)
        elif path.is_dir():
            found, rest = _list_files(path)
            images += found
            others += rest
        elif path not in slices:
            (images if formats.is_image(path) and not slices else others).append(path)
    return images, others


def _match(cases: Collection[str], labels: Collection[str]) -> dict[str, str]:
    """Return the label of each case, by names without what all of their kind begin and end with.

    Raises:
        Refusal: a case has no label, or a label no case.

    Example:
        >>> _match(["volume-1", "volume-2"], ["segmentation-2", "segmentation-1"])
        {'volume-1': 'segmentation-1', 'volume-2': 'segmentation-2'}
    """
    if set(cases) == set(labels):
        return {case: case for case in cases}
    case_of, label_of = _by_key(cases), _by_key(labels)
    images = sorted(case_of[key] for key in case_of.keys() - label_of.keys())
    others = sorted(label_of[key] for key in label_of.keys() - case_of.keys())
    if images or others:
        raise Refusal(
            f"expected a label for each image, got images without one: {images[:3]}, and labels "
            f"without image: {others[:3]}",
            "rename them, or move them away",
        )
    return {case: label_of[key] for key, case in case_of.items()}


def _by_key(names: Collection[str]) -> dict[str, str]:
    """Return names by themselves without what all begin and end with, except for digits."""
    start = len(_common(names).rstrip(_DIGITS))
    end = len(_common([name[start:][::-1] for name in names]).rstrip(_DIGITS))
    return {name[start : len(name) - end]: name for name in names}


def _common(names: Collection[str]) -> str:
    """Return what all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda each: len({*each}) == 1, zip(*names)))
