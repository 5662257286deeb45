"""Newton-Schulz iteration, which sets the singular values of matrices to about 1.

Each iteration multiplies an m x n matrix X, m <= n, by a polynomial of its Gram matrix R = X X^T::

    X <- (a I + b R + c R^2) X

Its coefficients a, b, c may differ between iterations. The m x m factors commute, so R and their product
Q can be iterated without X (Gram Newton-Schulz, Zhang et al., 2026)::

    Z = a I + b R + c R^2,    Q <- Q Z,    R <- R Z^2

X is multiplied by Q at the end. Five iterations take 4 m^2 n + 34 m^3 operations instead of
20 m^2 n + 10 m^3, so matrices that are nearly square are iterated themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nnunet_cpr.refusals import short_repr

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Triple]
"""Coefficients of Newton-Schulz: the name of a preset, or one triple for each iteration."""

PRESETS: dict[str, tuple[Triple, ...]] = {
    "original": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
}
"""Coefficients of Keller Jordan's Muon, of modded-nanogpt's GPT-2 medium, and of Polar Express."""

_GRAM_RATIO = 2
"""Ratio of the sides above which the Gram matrix is iterated, by timings on a CPU."""

_MAX_ERROR = 0.1
"""Estimated error of R above which it is computed from X again."""


def resolve_coefficients(coefficients: Coefficients, steps: int) -> list[Triple]:
    """Return one triple of coefficients for each iteration; the last one is repeated.

    Raises:
        ValueError: unknown preset, or not a sequence of triples of finite numbers.

    Example:
        >>> resolve_coefficients([(2, -1.5, 0.5), (1.5, -0.5, 0)], 3)
        [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0)]
    """
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ValueError(
                f"ns_coefficients: unknown preset {coefficients!r}; choose from {', '.join(PRESETS)}"
            )
        coefficients = PRESETS[coefficients]
    try:
        triples = [(float(a), float(b), float(c)) for a, b, c in coefficients]
    except (TypeError, ValueError):
        triples = []
    if not triples or not all(math.isfinite(x) for triple in triples for x in triple):
        raise ValueError(
            "ns_coefficients: expected a preset or triples of finite numbers, one for each iteration, "
            f"got {short_repr(coefficients)}"
        )
    return [triples[min(i, len(triples) - 1)] for i in range(steps)]


def batch_key(rows: int, columns: int) -> tuple[int, ...]:
    """Return the sides that all matrices of a batch for :func:`orthogonalize` have in common.

    Long matrices share the shorter side, since their Gram matrices are iterated, and the others both.

    Example:
        >>> batch_key(64, 864), batch_key(864, 64), batch_key(64, 48)
        ((64,), (64,), (48, 64))
    """
    shorter, longer = min(rows, columns), max(rows, columns)
    return (shorter,) if _is_long(shorter, longer) else (shorter, longer)


def _is_long(shorter: int, longer: int) -> bool:
    """Return True if iterating the Gram matrix takes less time than iterating the matrix."""
    return longer > _GRAM_RATIO * shorter


def orthogonalize(
    matrices: Sequence[Tensor], coefficients: Sequence[Triple], *, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return matrices with the same singular vectors and singular values of about 1.

    Args:
        matrices: matrices on one device with the same :func:`batch_key`.
        coefficients: coefficients of each iteration.
        eps: lower limit of the Frobenius norm that a matrix is divided by.
        dtype: dtype of the products and of the result.

    Example:
        >>> tall, wide = orthogonalize(
        ...     [torch.randn(6, 2), torch.randn(2, 9)],
        ...     resolve_coefficients("quintic", 5),
        ...     eps=1e-7,
        ...     dtype=torch.float32,
        ... )
        >>> bool((torch.linalg.svdvals(tall) - 1).abs().max() < 0.3)
        True
    """
    wide = [_normalize(m if m.shape[0] <= m.shape[1] else m.mT, eps).to(dtype) for m in matrices]
    iterate = _iterate_gram if _is_long(*wide[0].shape) else _iterate
    iterated = iterate(wide, coefficients)
    return [x if x.shape == matrix.shape else x.mT for x, matrix in zip(iterated, matrices)]


def _iterate(wide: list[Tensor], coefficients: Sequence[Triple]) -> list[Tensor]:
    """Iterate matrices of one shape."""
    batch = torch.stack(wide)
    for a, b, c in coefficients:
        gram = batch @ batch.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        batch = torch.baddbmm(batch, polynomial, batch, beta=a)
    return list(batch)


def _iterate_gram(wide: list[Tensor], coefficients: Sequence[Triple]) -> list[Tensor]:
    """Iterate the Gram matrices of matrices with equal shorter sides."""
    for section in _sections(coefficients, _unit_roundoff(wide[0].dtype, wide[0].device)):
        gram = torch.stack([x @ x.mT for x in wide])
        factor = product = _polynomial(gram, section[0])
        for triple in section[1:]:
            gram = gram @ factor @ factor
            factor = _polynomial(gram, triple)
            product = product @ factor
        wide = [q @ x for q, x in zip(product, wide)]
    return wide


def _polynomial(gram: Tensor, triple: Triple) -> Tensor:
    """Return a I + b R + c R^2."""
    a, b, c = triple
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _normalize(matrix: Tensor, eps: float) -> Tensor:
    """Return a matrix divided by its Frobenius norm, an upper bound of its singular values.

    The result is in float32 at least, because the squares of small gradients are zero in float16.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return matrix / torch.linalg.vector_norm(matrix).clamp_min(eps)


def _unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative rounding error of the factors of a matrix product.

    A GPU may round float32 to TensorFloat-32, by settings that differ between versions of torch.
    """
    if dtype == torch.float32 and device.type != "cpu":
        return 2.0**-11
    return torch.finfo(dtype).eps / 2


def _sections(coefficients: Sequence[Triple], roundoff: float) -> Iterator[list[Triple]]:
    """Yield lists of iterations, before each of which R is computed from X.

    An iteration multiplies eigenvalues of R near zero by a^2. Rounding makes some of them negative. The
    iteration diverges if they grow to the size of the other eigenvalues.

    Example:
        >>> coefficients = resolve_coefficients("quintic", 5)
        >>> for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ...     print([len(s) for s in _sections(coefficients, torch.finfo(dtype).eps / 2)])
        [5]
        [2, 3]
        [2, 2, 1]
    """
    section: list[Triple] = []
    error = roundoff
    for triple in coefficients:
        if section and error > _MAX_ERROR:
            yield section
            section, error = [], roundoff
        section.append(triple)
        error *= triple[0] ** 2
    yield section
