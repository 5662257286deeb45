"""Comparison with the authors' package ``pytorch-cpr``, where it agrees with the paper.

It corrects after Adam's move and we before it, so with gradients that do not depend on the parameters
both sequences are the same but for one last correction: our extra update.

Left out, because the package does something else there: ``l1`` on its foreach path (it decays by
theta instead of sign(theta)), its inflection point (docs/reference/pytorch-cpr.md),
and bounds below the initial measure, which bind one correction earlier here.
"""

from __future__ import annotations

import pytest
import torch

from nnunet_cpr import AdamCPR, KappaK, KappaKI0, KappaWS
from nnunet_cpr.cpr.bounds import Bound
from tests.helpers.oracle import measure

theirs = pytest.importorskip("pytorch_cpr")

STEPS = 200
SHAPE = (12, 7)


def _start() -> torch.nn.Parameter:
    return torch.nn.Parameter(0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))


def _bounds(regularizer: str) -> dict[str, tuple[Bound, str, float]]:
    """Return bounds, and the authors' names and values of them; their R is a sum, except for std."""
    value = 1.5 * measure(regularizer, _start().detach().double().numpy())
    numel = 1 if regularizer == "std" else SHAPE[0] * SHAPE[1]
    return {
        "ws": (KappaWS(20), "warm_start", 20),
        "k": (KappaK(value), "uniform", value * numel),
        "ki0": (KappaKI0(1.5), "dependent", 1.5),
    }


CASES = [("l2", True), ("std", False), ("huber", True), ("l1", False)]


@pytest.mark.parametrize("bound", ["ws", "k", "ki0"])
@pytest.mark.parametrize(("regularizer", "foreach"), CASES)
def test_agrees_with_the_authors_package(bound: str, regularizer: str, foreach: bool) -> None:
    kappa, method, value = _bounds(regularizer)[bound]
    mu = {"l2": 1.0, "std": 1.0, "huber": 0.1, "l1": 0.01}[regularizer]
    generator = torch.Generator().manual_seed(2)
    # A steady pull makes the parameter grow past its bound.
    pull = torch.randn(SHAPE, generator=generator)
    gradients = [pull + 0.5 * torch.randn(SHAPE, generator=generator) for _ in range(STEPS)]

    p, q = _start(), _start()
    ours = AdamCPR([p], lr=3e-3, kappa=kappa, regularizer=regularizer, mu=mu)
    reference = theirs.AdamCPR(
        [{"params": [q], "regularize": True}],
        lr=3e-3,
        kappa_init_method=method,
        kappa_init_param=value,
        reg_function=regularizer,
        kappa_update=mu,
        foreach=foreach,
    )
    for g in gradients:
        p.grad, q.grad = g.clone(), g.clone()
        ours.step()
        reference.step()
    ours.cpr.update_and_correct(None)

    assert reference.state[q]["lagmul"].item() > 1e-3, "the bound never bound"
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.cpr.lagrange_multiplier, reference.state[q]["lagmul"].reshape(1), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("method", "value"),
    [("warm_start", 10), ("uniform", 5.0), ("dependent", 1.0), ("inflection_point", 0)],
)
def test_authors_package_trains_on_this_torch(method: str, value: float, foreach: bool) -> None:
    """Every way to set a bound, on both paths; the page names the one that sets none."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = theirs.AdamCPR(
        model,
        lr=1e-2,
        kappa_init_method=method,
        kappa_init_param=value,
        reg_step_size=5,
        foreach=foreach,
    )
    inputs, labels, losses = torch.randn(64, 16), torch.arange(64) % 2, []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    multipliers = [state["lagmul"].item() for state in optimizer.state.values()]
    assert any(multipliers) == (foreach or method != "inflection_point")
