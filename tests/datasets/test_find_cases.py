"""Cases of images without segmentations, by their names."""

from pathlib import Path

import pytest

from nnunet_cpr.datasets.matching import find, find_cases
from nnunet_cpr.refusals import Refusal


@pytest.mark.parametrize(
    ("names", "channels", "cases"),
    [
        (["a_0000.nii.gz", "b.mha"], ["CT"], {"a": ["a_0000.nii.gz"], "b": ["b.mha"]}),
        (["a_0001.nrrd", "a_0007.mha"], ["CT"], {"a_0001": ["a_0001.nrrd"], "a_0007": ["a_0007.mha"]}),
        (["a_0000.mha", "a_0001.nrrd"], ["T1", "T2"], {"a": ["a_0000.mha", "a_0001.nrrd"]}),
        (["a_T2.mha", "a_T1.mha"], ["T1", "T2"], {"a": ["a_T1.mha", "a_T2.mha"]}),
        (["p1/T1.mha", "p1/T2.mha"], ["T1", "T2"], {"p1": ["T1.mha", "T2.mha"]}),
        (["p1/ct.mha", "p2/ct.mha"], ["CT"], {"p1": ["ct.mha"], "p2": ["ct.mha"]}),
        (["a_0000.mha", "b_0001.mha"], ["T1", "T2"], "got a_0000.mha, b_0001.mha; rename"),
        (["a_0000.mha", "a.mha"], ["T1", "T2"], "got a.mha, a_0000.mha; rename"),
        (["a.mha", "a.nrrd"], ["CT"], "CASE_0000, or CASE, of each case, got a.mha, a.nrrd; rename"),
        (["a_0000.mha", "a_0001.mha"], ["CT"], "got a_0000.mha, a_0001.mha; rename"),
        (
            ["a_T1.mha", "a_T2.mha", "b_0000.mha", "b_0001.mha"],
            ["T1", "T2"],
            "got b_0000.mha, b_00",
        ),
        (
            ["a_T1.mha", "a_T2.mha", "a_FLAIR.mha"],
            ["T1", "T2"],
            "got a_FLAIR.mha; rename or move",
        ),
    ],
)
def test_cases_are_named_as_by_nnunet_or_freely(
    tmp_path: Path, names: list[str], channels: list[str], cases: dict[str, list[str]] | str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if isinstance(cases, str):
        with pytest.raises(Refusal, match=cases):
            find_cases(find(tmp_path), channels)
        return
    found = find_cases(find(tmp_path), channels)
    assert {case: [path.name for path in paths] for case, paths in found.items()} == cases
