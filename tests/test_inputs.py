"""Every run of the tests has the same inputs, whichever tests ran before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("turn", [1, 2])
def test_global_generators_are_seeded_before_each_test(turn: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
