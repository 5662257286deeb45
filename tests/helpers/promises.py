"""Properties that hold for any input; hypothesis and atheris search for counterexamples.

A ``pick(n)`` gives a number from 0 to n - 1, chosen by hypothesis or atheris.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nnunet_cpr import CPR, KappaIP
from nnunet_cpr.baselines import AdaDecay
from nnunet_cpr.bounds import Bound, read_bound
from nnunet_cpr.names import WrongName
from nnunet_cpr.names import run_name as runs
from nnunet_cpr.names import trainer_name as trainers
from nnunet_cpr.nnunet.fold_files import LOG_COLUMNS, read_logs
from nnunet_cpr.studies.definition import Study, StudyError, load, save

Pick = Callable[[int], int]


def assert_one_line(error: BaseException | str) -> None:
    message = str(error)
    assert message and len(message.splitlines()) == 1, message
    assert len(message) < 2000, message


def name_is_read_or_refused(text: str) -> None:
    """Check that a name of a trainer, run or bound is parsed, not ours, or refused in one line."""
    for parse in (trainers.parse_trainer_name, runs.parse_run_name):
        try:
            name = parse(text)
        except WrongName as error:
            assert_one_line(error)
            continue
        if name is None:
            assert parse is trainers.parse_trainer_name
            continue
        printed = str(name)
        assert parse(printed) == name and str(parse(printed)) == printed
    try:
        bound = read_bound(text)
    except WrongName as error:
        assert_one_line(error)
        return
    assert isinstance(bound, Bound)
    printed = str(runs.RunName("AdamCPR", kappa=bound)).removeprefix("AdamCPR_")
    assert read_bound(printed) == bound


def study_file_is_read_or_refused(content: bytes, folder: Path) -> Study | None:
    """Check that a study is loaded, and unchanged after saving, or refused in one line."""
    file = folder / "given.yaml"
    file.write_bytes(content)
    try:
        study = load(str(file))
    except StudyError as error:
        assert_one_line(error)
        return None
    save(study, folder / "again.yaml")
    assert load(str(folder / "again.yaml")) == study
    for run in study.runs():
        assert run.folder(folder).resolve().is_relative_to(folder.resolve())
        break
    return study


def log_is_read(content: bytes, fold: Path) -> None:
    """Check that the table of a training log has its columns with numbers or NaN."""
    (fold / "training_log_2026_1_1_00_00_00.txt").write_bytes(content)
    table = read_logs(fold)
    assert list(table) == LOG_COLUMNS
    numbers = table[LOG_COLUMNS[1:]].to_numpy()
    assert numbers.dtype == float and not np.isinf(numbers).any()
    assert table["epoch"].is_unique and table["epoch"].between(0, 10**9).all()


# State dicts

STRANGE: list[Any] = [
    *(None, True, -1, 0, 2**70, math.nan, math.inf, "", "two\nlines", b"\xff", 1j),
    *([], {}, (), set(), [[]], {"a": 1}, ["a", "a"], object, "x" * 500),
    torch.tensor(math.nan),
    torch.tensor(-5),
    torch.zeros(0),
    torch.full((2,), math.nan),
    torch.full((2,), -1.0),
    torch.full((2,), math.inf),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.float64),
    torch.ones(2, dtype=torch.int64),
    torch.ones(2).to_sparse(),
    torch.ones(2, device="meta"),
    torch.ones(2, requires_grad=True),
    torch.ones(2, 2),
]


def mutate(tree: Any, pick: Pick) -> None:
    """Change, rename or delete one place of nested dictionaries and lists."""
    paths: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = (
            list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        )
        for key in keys:
            paths.append((node, key))
            walk(node[key])

    walk(tree)
    if not paths:
        return
    container, key = paths[pick(len(paths))]
    what = pick(5)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        new = STRANGE[pick(len(STRANGE))]
        if getattr(type(new), "__hash__", None) is not None:
            container[new] = container.pop(key)
    elif what == 2:
        value = container[key]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            container[key] = value.reshape(-1)[: pick(value.numel() + 1)]
        elif isinstance(value, list):
            value.extend(value[: 1 + pick(2)])
    else:
        container[key] = copy.deepcopy(STRANGE[pick(len(STRANGE))])


class Loading:
    """Regularizers of a small model that load damaged states."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizers = []
        for kind in (
            lambda: CPR(model, kappa=KappaIP(1), regularizer="std", adaptive=True),
            lambda: AdaDecay(model, 1e-2, 4.0),
        ):
            regularizer = kind()
            optimizer = regularizer.attach(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
            for _ in range(3):
                optimizer.step()
            self.optimizers.append((regularizer, optimizer))

    def is_taken_or_refused(self, pick: Pick) -> bool:
        """Load one damaged state and check that it is either usable or refused without a change."""
        regularizer, optimizer = self.optimizers[pick(len(self.optimizers))]
        before = optimizer.state_dict()
        damaged = copy.deepcopy(before)
        own = damaged[regularizer.state_key]
        for _ in range(1 + pick(2)):
            mutate(own, pick)
        through_optimizer = pick(2) == 1
        try:
            if through_optimizer:
                optimizer.load_state_dict(damaged)
            else:
                regularizer.load_state_dict(own)
        except ValueError as error:
            assert_one_line(error)
            assert _plain(optimizer.state_dict()) == _plain(before)
            return False
        kinds = {key: (v.dtype, v.shape) for key, v in before[regularizer.state_key]["state"].items()}
        after = optimizer.state_dict()[regularizer.state_key]["state"]
        assert {key: (v.dtype, v.shape) for key, v in after.items()} == kinds
        for key in ("step", "kappa", "lagrange_multiplier"):
            assert (after.get(key, torch.zeros(1)) >= 0).all(), key
        optimizer.step()
        optimizer.load_state_dict(before)
        return True


def _plain(tree: Any) -> str:
    """Return a text that is equal for equal content, NaN included."""
    if isinstance(tree, dict):
        return repr({key: _plain(value) for key, value in tree.items()})
    if isinstance(tree, list):
        return repr([_plain(value) for value in tree])
    return repr(tree.tolist() if isinstance(tree, torch.Tensor) else tree)
