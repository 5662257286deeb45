"""Error of sums of squares in the order in which torch's kernel adds on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nnunet_cpr.cpr.sums import squared_norms, sums_of_squares

BLOCK, THREADS, AT_ONCE = 65536, 512, 4
"""Elements of a block, and its threads, each of which loads four elements at a time."""


def norm_as_on_a_gpu(values: np.ndarray) -> np.float32:
    """Return the norm that the kernel of a list gives: rows within a thread, then trees."""
    squares = np.zeros(-(-len(values) // BLOCK) * BLOCK, np.float32)
    squares[: len(values)] = values.astype(np.float32) ** 2
    lanes = squares.reshape(-1, BLOCK // (THREADS * AT_ONCE), THREADS, AT_ONCE)
    sums = lanes[:, 0].copy()
    for row in lanes.swapaxes(0, 1)[1:]:
        sums += row
    return np.sqrt(tree(tree(sums.reshape(len(sums), -1).T)[:, None])[0])


def tree(values: np.ndarray) -> np.ndarray:
    """Return sums over the first axis, of halves in float32."""
    while len(values) > 1:
        half = -(-len(values) // 2)
        values, rest = values[:half].copy(), values[half:]
        values[: len(rest)] += rest
    return values[0]


@pytest.mark.parametrize("count", [1000, 2_764_800, 3_000_000])
@pytest.mark.parametrize("spread", ["normal", "equal", "heavy"])
def test_blocks_in_float32_are_exact_to_2en6(count: int, spread: str) -> None:
    generator = np.random.default_rng(0)
    values = {
        "normal": lambda: generator.normal(size=count),
        "equal": lambda: np.full(count, 0.1),
        "heavy": lambda: generator.standard_t(3, size=count),
    }[spread]().astype(np.float32)
    exact = np.square(values.astype(np.float64)).sum()
    assert abs(np.float64(norm_as_on_a_gpu(values)) ** 2 / exact - 1) < 2e-6
    of_rows = sums_of_squares([torch.from_numpy(values)]).item()
    assert abs(of_rows / exact - 1) < (2e-5 if spread == "equal" else 2e-7)  # equal errors add up


def test_norms_of_a_list_are_those_of_its_tensors() -> None:
    tensors = [torch.full((3, 4), 2.0), torch.ones(5, dtype=torch.bfloat16), torch.ones(2).double()]
    assert squared_norms(tensors).tolist() == pytest.approx([48, 5, 2])
    assert squared_norms(tensors[:1] * 2).tolist() == pytest.approx([48, 48])
