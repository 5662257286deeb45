"""Images and segmentations of one's own, matched by their names."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Column, Table

from nnunet_cpr.datasets import formats
from nnunet_cpr.datasets.archive import Archive, Case, CheckedCase, DataSet
from nnunet_cpr.datasets.matching import Found, Matching, find, match
from nnunet_cpr.datasets.raw import write_cases
from nnunet_cpr.refusals import Refusal

_SHOWN = 10
"""Number of cases in the table, and of files in a note."""
_MOST_LABELS = 255
"""Number of labels that segmentations of 8 bits can have."""

_SPACING_FILE = 'without a.json with {"spacing": [z, y, x]} beside a.tif'


@dataclass
class OwnFolder(DataSet):
    """Images, which are the source, and segmentations: each a folder, or the files of a pattern.

    Attributes:
        labels: folder or pattern of the segmentations, none of which is taken as an image.
        channels: name of each channel, and the ending of its files. If there are several, the names of
            the files end with it, or with nnU-Net's ``_0000``.
        label_names: names of the values of the segmentations above 0, in ascending order.
        pattern: regular expression of the part of a path that names the case.
        show_all: show every case and file instead of the first ones.
        named: the values of the segmentations with their names, after :meth:`name_labels`.
        notes: lines about files that are left out or lack a spacing, after :meth:`open`.
    """

    number = 501

    labels: Path
    name: str
    channels: Sequence[tuple[str, str]] = ()
    label_names: Sequence[str] = ()
    pattern: str | None = None
    show_all: bool = False
    named: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def open(self, source: Path) -> Archive:
        images, labels = find(source), find(self.labels)
        segmentations = {path.resolve() for path in labels.images}
        own = [path for path in images.images if path.resolve() not in segmentations]
        if not own:
            raise Refusal(
                f"{images.images[0]}: expected images and segmentations in two folders, got it in both",
                "give a pattern that only the segmentations have, such as 'data/*/*seg.nii.gz'",
            )
        images = images._replace(images=own)
        matching = match(images, labels, [ending for _, ending in self.channels], self.pattern)
        self._take_notes(images, labels, matching)
        cases = self._list_cases(matching)
        return Archive(source, cases, range(2**16), advice="mend the file, or move the case away")

    def _take_notes(self, images: Found, labels: Found, matching: Matching) -> None:
        """Note files that are left out, and voxels whose size is not known."""
        files = [*images.images, *labels.images]
        taken = {path for each in matching.images.values() for paths in each.values() for path in paths}
        taken.update(matching.labels.values())
        without_spacing = [path for path in files if formats.lacks_spacing(path)]
        root = os.path.commonpath([found.root.absolute().parent for found in (images, labels)])
        for title, paths in (
            ("left out (no image, hidden, or a link to nowhere)", [*images.others, *labels.others]),
            ("left out (by --channels or --match)", [path for path in files if path not in taken]),
            ("voxels of 1 mm, as nnU-Net assumes " + _SPACING_FILE, without_spacing),
        ):
            names = [os.path.relpath(path, root) for path in paths]
            if names:
                self.notes.append(f"{title}: {', '.join(self._shorten(names, _SHOWN))}")

    def _list_cases(self, matching: Matching) -> list[Case]:
        """Return the cases, each with an image of every channel and a segmentation.

        Raises:
            Refusal: a case lacks one, or a channel has several.
        """
        images, labels, pairs = matching
        for case, channels in images.items():
            for first, *others in channels.values():
                if others:
                    got = f"got {first} and {others[0]}"
                    raise Refusal(f"{case}: expected one file a channel, {got}", "move one away")
        lone_images, lone_labels = images.keys() - pairs.keys(), labels.keys() - pairs.values()
        if lone_images or lone_labels or not pairs:
            self._refuse_unmatched(sorted(lone_images), sorted(lone_labels))
        expected = list(range(len(self.channels) or max(map(len, images.values()))))
        for case, channels in images.items():
            if sorted(channels) != expected:
                raise Refusal(
                    f"{case}: expected the channels {expected}, got {sorted(channels)}",
                    "name them as the files end, such as --channels T1,T2 for a_T1.nrrd and a_T2.nrrd",
                )
        return [
            Case(case, tuple(images[case][n][0] for n in expected), labels[pairs[case]])
            for case in sorted(images)
        ]

    def _refuse_unmatched(self, images: Sequence[str], labels: Sequence[str]) -> None:
        """Raise a Refusal that names the cases without a segmentation or without an image."""
        for case in images:
            structures = [label for label in labels if label.startswith(f"{case}_")]
            if len(structures) > 1:
                raise Refusal(
                    f"{case}: expected one segmentation, got {self._shorten(structures)}",
                    "give a pattern of one structure, such as 'data/*/segmentations/liver.nii.gz', or "
                    "merge them into one file with a value each",
                )
        raise Refusal(
            f"expected a label for each image, got images without one: {self._shorten(images)}, and "
            f"labels without image: {'; '.join([str(self._shorten(labels)), *self.notes])}",
            "rename or move them, give patterns or --channels, or --match with the part of a path that "
            "names the case, such as 'p[0-9]+'",
        )

    def _shorten(self, names: Sequence[str], shown: int = 3) -> list[str]:
        """Return the first names, and how many others there are."""
        if self.show_all or len(names) <= shown:
            return [*names]
        return [*names[:shown], f"{len(names) - shown} more, which --all shows"]

    def name_labels(self, checked: Sequence[CheckedCase]) -> None:
        """Name the values that the segmentations have.

        Raises:
            Refusal: there is none above 0, too many, or the number of names is another one.
        """
        values = sorted(set().union(*(each.label_values for each in checked)) - {0})
        if not 1 <= len(values) <= _MOST_LABELS:
            got = f"{len(values)} in all segmentations together"
            raise Refusal(
                f"{self.labels}: expected 1 to {_MOST_LABELS} values above 0, got {got}",
                "check that these are the segmentations",
            )
        names = self.label_names or [f"label {value}" for value in values]
        if len(names) != len(values):
            expected = f"a name for each of the values {values}"
            raise Refusal(f"--label-names: expected {expected}, got {len(names)}")
        if len({"", "background", *names}) < len(names) + 2:
            raise Refusal(f"--label-names: expected different names, no background, got {names}")
        self.named = {0: "background", **dict(zip(values, names))}

    def describe(self, archive: Archive, checked: Sequence[CheckedCase]) -> Iterator[Table | str]:
        """Yield a table of the first cases, and notes about all files."""
        titles = ("image", "label", "size", "mm", "values")
        table = Table(*(Column(title, overflow="fold") for title in titles), box=None)
        images = _from_common_folder([case.images for case in archive.cases])
        labels = _from_common_folder([(case.label,) for case in archive.cases if case.label])
        shown = len(checked) if self.show_all else _SHOWN
        for image, label, result in list(zip(images, labels, checked))[:shown]:
            spacing = [f"{side:.3g}" for side in result.spacing]
            numbers = (result.size, spacing, sorted(result.label_values))
            table.add_row(image, label, *(" ".join(map(str, each)) for each in numbers))
        yield table
        if len(checked) > shown:
            yield f"the first {shown} cases; --all shows them and {len(checked) - shown} more"
        yield from self.notes
        cases = zip(archive.cases, checked)
        if empty := [case.name for case, result in cases if not any(result.label_values)]:
            yield f"0 is the only value of: {', '.join(self._shorten(empty, _SHOWN))}"

    def describe_names(self) -> Iterator[str]:
        """Yield the names and new values of the labels, and nnU-Net's normalization of the channels."""
        from nnunetv2.preprocessing.normalization.map_channel_name_to_normalization import (
            get_normalization_scheme,
        )

        for new, (value, name) in enumerate(self.named.items()):
            yield f"value {value}: {name}" + ("" if new == value else f", becomes {new}")
        for channel, _ in self.channels:
            yield f"channel {channel}: {get_normalization_scheme(channel).__name__}"

    def write(self, archive: Archive, folder: Path, processes: int) -> None:
        from nnunetv2.experiment_planning.verify_dataset_integrity import verify_dataset_integrity

        new_values = {value: new for new, value in enumerate(self.named)}
        labels = {name: new for new, name in enumerate(self.named.values())}
        write_cases(
            archive, folder, processes, [name for name, _ in self.channels], new_values, labels=labels
        )
        try:
            with contextlib.redirect_stdout(sys.stderr):
                verify_dataset_integrity(str(folder), processes)
        except (AssertionError, RuntimeError) as error:
            raise Refusal(f"{folder.name}: refused by nnU-Net: {error}") from error


def _from_common_folder(files: Sequence[Sequence[Path]]) -> list[str]:
    """Return the files of each case in a line each, from the last folder on that has all."""
    root = os.path.commonpath([path.parent for paths in files for path in paths])
    return ["\n".join(str(path.relative_to(root)) for path in paths) for paths in files]
