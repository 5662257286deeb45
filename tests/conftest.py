from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import nnunet_cpr_discovery
import numpy as np
import pytest
import torch
from hypothesis.internal.conjecture import providers

from tests.helpers import ROOT, examples

if TYPE_CHECKING:
    from tests.helpers.workspace import Workspace

# Variables of the user's shell must not change a test. Some are read at import.
_PREFIXES = ("nnUNet", "NNUNET_CPR", "SLURM_", "SUBMITIT_", "TYPER_")
_NAMES = ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "RANK", "LOCAL_RANK", "WORLD_SIZE")
for _name in [name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES]:
    del os.environ[_name]
nnunet_cpr_discovery.register()
# Tests run side by side, and so do the commands that they start: one thread each. Threads that nnU-Net
# starts all the same sleep while they wait.
torch.set_num_threads(1)
os.environ |= {"OMP_NUM_THREADS": "1", "NNUNET_CPR_CPU_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# A shell's background jobs ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Same inputs in every run


class _TorchGenerator:
    """torch's global generator, for hypothesis to seed before each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH = _TorchGenerator()  # hypothesis keeps a weak reference only
hypothesis.register_random(_TORCH)
examples.register_profiles()
# Hypothesis also draws constants of the modules that are imported already, so that an example would
# depend on the tests that ran before. Older versions do not.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        is_search = config.getoption("markexpr") == "release"
        hypothesis.settings.load_profile(examples.SEARCH if is_search else examples.DEFAULT)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the release stage search at random with every test that hypothesis has examples for."""
    if examples.is_search():
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.release)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed()


@pytest.fixture(autouse=True)
def hide_distributed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a module that other tests import: state dicts depend on it."""
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint.state_dict", raising=False)


@pytest.fixture
def model() -> torch.nn.Module:
    """Two convolutions, a normalization, an output matrix: four kinds of parameters in float64."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Conv2d(4, 3, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 5),
    ).double()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a small data set, planned and preprocessed by nnU-Net, for tests that run its commands."""
    from tests.helpers.workspace import make_workspace  # imports nnU-Net

    return make_workspace(tmp_path_factory.mktemp("nnunet"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of the Decathlon's Task04_Hippocampus; skip without it."""
    for folder in (ROOT / "shared" / "data", ROOT.parent / "shared" / "data"):
        if (folder / "Task04_Hippocampus" / "dataset.json").exists():
            return folder / "Task04_Hippocampus"
    pytest.skip("the Hippocampus data is not here")
