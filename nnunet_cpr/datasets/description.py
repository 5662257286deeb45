"""The ``dataset.json`` of an archive in the Decathlon's layout, which AMOS22 has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnunet_cpr._files import read_json
from nnunet_cpr.datasets.archive import AGAIN, PrepareError

ENDING = ".nii.gz"


@dataclass(frozen=True)
class Description:
    """What ``dataset.json`` says.

    Attributes:
        lists: the images' names without their ending, for each list that was asked for.
        labels: each name's value.
        channels: names in the order of their numbers, none where it does not say.
        training_cases: how many it says there are, if it does.
    """

    lists: Mapping[str, Sequence[str]]
    labels: Mapping[str, int]
    channels: Sequence[str]
    training_cases: int | None


def read_description(folder: Path, lists: Sequence[str]) -> Description:
    """Read an archive's ``dataset.json``.

    Raises:
        PrepareError: it is damaged or lacks something.
    """
    path = folder / "dataset.json"
    try:
        document = read_json(path)
        return Description(
            lists={name: [_identifier(entry) for entry in document[name]] for name in lists},
            labels={name: int(value) for value, name in document["labels"].items()},
            channels=[name for _, name in sorted(document.get("modality", {}).items())],
            training_cases=document.get("numTraining"),
        )
    except KeyError as error:
        raise PrepareError(f"{path} has no entry {error}; {AGAIN}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PrepareError(f"{path} is damaged ({error}); {AGAIN}") from error


def _identifier(entry: str | dict[str, str]) -> str:
    """Training cases are told of as ``{"image": ..., "label": ...}``, others by a path alone."""
    path = entry if isinstance(entry, str) else entry["image"]
    return Path(path).name.removesuffix(ENDING)
