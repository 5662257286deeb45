"""Reader of ``dataset.json`` in archives with the Decathlon's layout, which AMOS22 has as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnunet_cpr._files import read_json
from nnunet_cpr.datasets.archive import AGAIN, PrepareError

ENDING = ".nii.gz"


@dataclass(frozen=True)
class Description:
    """Contents of ``dataset.json``.

    Attributes:
        lists: names of the images without file ending, for each requested list.
        labels: value of each label.
        channels: names of the channels in order, empty if the file has none.
        training_cases: number of training cases, None if the file has none.
    """

    lists: Mapping[str, Sequence[str]]
    labels: Mapping[str, int]
    channels: Sequence[str]
    training_cases: int | None


def read_description(folder: Path, lists: Sequence[str]) -> Description:
    """Read the ``dataset.json`` of an archive.

    Raises:
        PrepareError: it is damaged or incomplete.
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
    """Return the name of a case; training cases are ``{"image": ..., "label": ...}``, others paths."""
    path = entry if isinstance(entry, str) else entry["image"]
    return Path(path).name.removesuffix(ENDING)
