"""Newton-Schulz, against singular value decompositions and timm's function."""

from __future__ import annotations

import pytest
import torch
from timm.optim import muon as timm_muon
from torch import Tensor

from nnunet_cpr.optimizers.newton_schulz import PRESETS, batch_key, orthogonalize, resolve_coefficients
from tests.helpers.oracle import newton_schulz

ROWS = 48
COLUMNS = (48, 200)
"""A square matrix is iterated itself, of a long one the Gram matrix."""
INDEX = torch.arange(1, ROWS + 1, dtype=torch.float64)
SPECTRA = {
    "equal": torch.ones(ROWS, dtype=torch.float64),
    "decaying": INDEX**-2,
    "wide": torch.logspace(0, -8, ROWS, dtype=torch.float64),
    "rank 8": (INDEX <= 8).double(),
    "rank 1": (INDEX <= 1).double(),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix(spectrum: str, columns: int) -> Tensor:
    """Return a matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, ROWS, generator=generator, dtype=torch.float64))[0]
        for n in (ROWS, columns)
    )
    return (left * SPECTRA[spectrum]) @ right.mT


def orthogonalized(x: Tensor, dtype: torch.dtype = torch.float64, preset: str = "quintic") -> Tensor:
    return orthogonalize([x], resolve_coefficients(preset, 5), eps=1e-7, dtype=dtype)[0]


def timms(x: Tensor, dtype: torch.dtype, preset: str = "quintic") -> Tensor:
    coefficients = list(PRESETS[preset])
    return timm_muon.zeropower_via_newtonschulz(x, 5, coefficients, dtype=dtype)


def error(result: Tensor, expected: Tensor) -> float:
    """Return the spectral norm of the difference, of matrices whose norm is about 1."""
    assert result.isfinite().all()
    return float(torch.linalg.matrix_norm(result.double() - expected, 2))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_agrees_with_singular_value_decomposition(spectrum: str, columns: int) -> None:
    x = matrix(spectrum, columns)
    for given in (x, x.mT, 1e-3 * x, x.mT.contiguous()):
        expected = torch.from_numpy(newton_schulz(given.numpy()))
        assert error(orthogonalized(given), expected) < 1e-9
        # Rounding depends on the processor: up to 2.6e-3 were seen.
        assert error(orthogonalized(given.float(), torch.float32), expected) < 5e-3


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("preset", PRESETS)
def test_error_is_not_above_timms_in_half_precision(preset: str, columns: int) -> None:
    """The limit is the largest error of timm's function over the spectra, in the same dtype."""
    for dtype in DTYPES:
        ours, limit = 0.0, 0.05 if dtype == torch.float32 else 0.0
        for spectrum in SPECTRA:
            x = matrix(spectrum, columns).float()
            expected = timms(x.double(), torch.float64, preset)
            ours = max(ours, error(orthogonalized(x, dtype, preset), expected))
            if dtype != torch.float32:
                limit = max(limit, error(timms(x, dtype, preset), expected))
        assert ours < 1.2 * limit, dtype


@pytest.mark.parametrize("columns", COLUMNS)
def test_gradients_of_any_size_are_normalized(columns: int) -> None:
    """Also those whose squares are not in the range of the dtype."""
    x = matrix("equal", columns)
    expected = orthogonalized(x)
    for dtype in DTYPES:
        for scale in (1e-6, 1e6):
            assert error(orthogonalized((scale * x).float(), dtype), expected) < 0.1
        assert not orthogonalized(torch.zeros(3, 5), dtype).any()


def test_matrices_of_a_batch_are_orthogonalized_as_alone() -> None:
    for shapes in (((6, 8), (8, 6), (6, 8)), ((6, 20), (20, 6), (6, 30))):
        assert len({batch_key(*shape) for shape in shapes}) == 1
        matrices = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        coefficients = resolve_coefficients("quintic", 5)
        together = orthogonalize(matrices, coefficients, eps=1e-7, dtype=torch.float64)
        for x, result in zip(matrices, together):
            torch.testing.assert_close(result, orthogonalized(x))
    assert batch_key(6, 20) != batch_key(6, 8)


def test_presets_are_those_of_timm() -> None:
    for name, triples in PRESETS.items():
        assert list(triples) == timm_muon._COEFFICIENTS[name]
