"""Study files and presets."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from nnunet_cpr import KappaWS
from nnunet_cpr.names.trainer_name import parse_trainer_name
from nnunet_cpr.refusals import Refusal
from nnunet_cpr.studies.study_file import PRESETS, json_schema, load, preset_names, save

# The paper's table of segmentation results: weight decays 1e-5 to 1e-1, then warm starts of 1k to 4k.
PAPER = {
    "btcv": (500, 3, [83.04, 83.1, 83.17, 83.99, 73.92, 81.17, 84.14, 84.23, 55.41]),
    "heart": (100, 5, [92.92, 92.75, 92.88, 92.9, 92.85, 92.77, 93.18, 93.16, 74.44]),
    "brats2020": (100, 5, [75.85, 76.01, 76.22, 76.12, 75.42, 75.29, 76.46, 76.65, 75.63]),
}


@pytest.mark.parametrize("name", PAPER)
def test_presets_match_the_papers_table(name: str) -> None:
    study = load(name)
    epochs, folds, published = PAPER[name]
    (dataset,) = study.datasets
    assert list(study.folds) == list(range(folds))
    assert [row.published[dataset] for row in study.trainers] == published
    settings = [parse_trainer_name(row.trainer) for row in study.trainers]
    assert {s.epochs for s in settings} == {epochs}
    assert [s.weight_decay for s in settings[:5]] == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert [s.kappa for s in settings[5:]] == [KappaWS(n) for n in (1000, 2000, 3000, 4000)]
    best = max(study.trainers[:5], key=lambda row: row.published[dataset])
    assert study.reference == best.trainer


def write(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


def test_short_file_has_defaults_and_a_number_for_its_data_set(tmp_path: Path) -> None:
    """YAML 1.1 would read 017 as the octal number 15."""
    study = load(write(tmp_path, "datasets: 017\ntrainers: [nnUNetTrainer, Theirs]\n"))
    assert (study.name, study.datasets, study.reference) == ("mine", ("17",), "nnUNetTrainer")
    assert len(list(study.runs())) == 10


def test_folds_and_seeds_are_lists_or_ranges(tmp_path: Path) -> None:
    for written, numbers in (("0,4-5", (0, 4, 5)), ("[3]", (3,))):
        study = load(write(tmp_path, f"trainers: [B]\nfolds: {written}\nseeds: {written}\n"))
        assert study.folds == study.seeds == numbers


def test_schema_accepts_the_presets_and_refuses_a_wrong_key() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for name in preset_names():
        validator.validate(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))
    with pytest.raises(jsonschema.ValidationError, match="'trainer' was unexpected"):
        validator.validate({"trainers": ["B"], "trainer": "B"})


def test_saved_study_loads_unchanged(tmp_path: Path) -> None:
    for name in preset_names():
        study = load(name)
        save(study, tmp_path / f"{name}.yaml")
        assert load(str(tmp_path / f"{name}.yaml")) == study


# More mistakes are in tests/golden/test_command_errors.py.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: A\ntrainers: ['B C']", "expected the class name of a trainer"),
        (
            "datasets: A\ntrainers: [7]",
            "expected a class name or a mapping with 'trainer', got 7",
        ),
        ("datasets: A\ntrainers: [{label: B}]", r"trainers\[0\].trainer: expected this entry"),
        ("datasets: A\ntrainers: [B]\nseeds: 3", "3 is one seed; for 3 seeds write 1-3, for seed 3"),
        ("datasets: A\ntrainers: [B]\nfolds: 5", "5 is one fold; for 5 folds write 0-4, for fold 5"),
        ("datasets: A\ntrainers: [B]\nfolds: 4-2", "folds: expected different whole numbers"),
        ("datasets: A\ntrainers: [B]\nname: a/b", "name: expected a name of letters"),
        ("datasets: A\ntrainers: [B]\nmargin: {hd95: -1}", "margin.hd95: expected a number greater"),
        ("datasets: A\ntrainers: [B]\nmargin: 1e9", "margin.dice: expected a number less"),
        ("datasets: A\ntrainers: [B]\nmargin: wide", "margin.dice: expected a valid number"),
    ],
)
def test_invalid_file_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_margin_holds_for_all_metrics_or_one(tmp_path: Path) -> None:
    header = "datasets: A\ntrainers: [B]\n"
    assert load(write(tmp_path, header)).margin == {"dice": 0.1, "hd95": 0.1, "nsd": 0.1}
    assert load(write(tmp_path, header + "margin: 0.5")).margin["nsd"] == 0.5
    study = load(write(tmp_path, header + "margin: {hd95: 1.5}"))
    assert study.margin == {"dice": 0.1, "hd95": 1.5, "nsd": 0.1}


def test_empty_text_is_its_default_and_numbers_have_exponents(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-1 as text."""
    text = "trainers: [{trainer: B, label: , group: }, C]\nreference:\nnon_inferior_to:\nsource:\n"
    study = load(write(tmp_path, text + "margin: 1e-1\ntolerance: 2E0\n"))
    assert study.reference == study.non_inferior_to == "B" and study.trainers[0].full_title == "B"
    assert set(study.margin.values()) == {0.1} and study.tolerance == 2
    document = yaml.safe_load(text)
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert load(write(tmp_path, text + "margin: {dice: 5e-1}\n")).margin["dice"] == 0.5


NETWORKS = """
plans: nnUNetPlans
trainers:
  - nnUNetTrainer
  - {trainer: nnUNetTrainer, plans: nnUNetResEncUNetMPlans, label: ResEnc M}
  - {trainer: nnUNetTrainer, configuration: 2d}
"""


def test_trainer_may_have_its_own_plans_and_configuration(tmp_path: Path) -> None:
    study = load(write(tmp_path, f"datasets: 4\nfolds: 0-0\nreference: ResEnc M\n{NETWORKS}"))
    assert [(run.entry, run.plans, run.configuration) for run in study.runs()] == [
        ("nnUNetTrainer", "nnUNetPlans", "3d_fullres"),
        ("nnUNetTrainer, nnUNetResEncUNetMPlans", "nnUNetResEncUNetMPlans", "3d_fullres"),
        ("nnUNetTrainer, 2d", "nnUNetPlans", "2d"),
    ]
    assert study.reference == study.non_inferior_to == "nnUNetTrainer, nnUNetResEncUNetMPlans"
    assert study.used_plans == {
        "nnUNetPlans": ["3d_fullres", "2d"],
        "nnUNetResEncUNetMPlans": ["3d_fullres"],
    }
    assert len({run.key for run in study.runs()}) == 3
    save(study, tmp_path / "saved.yaml")
    assert load(str(tmp_path / "saved.yaml")) == study


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("plans: [A, B]", "plans: expected one beside a trainer with its own plans"),
        ("configurations: [2d, 3d_fullres]", "configurations: expected one beside a trainer"),
        ("reference: nnUNetTrainerX", "reference: expected one of the trainers"),
        ("plans: nnUNetResEncUNetMPlans", "trainers: expected each training once"),
    ],
)
def test_ambiguous_settings_are_refused(changes: str, message: str, tmp_path: Path) -> None:
    text = NETWORKS.replace("plans: nnUNetPlans\n", "") if changes.startswith("plans") else NETWORKS
    with pytest.raises(Refusal, match=message):
        load(write(tmp_path, f"datasets: 4\n{changes}\n{text}"))
