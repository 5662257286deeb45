"""Settings of CPR in parameter groups, and the spellings of bounds and regularization functions."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr.cpr.bounds import Bound, as_bound
from nnunet_cpr.cpr.regularizers import Huber
from nnunet_cpr.optimizers import FusedSGD, Muon
from tests.helpers.examples import examples
from tests.helpers.matrices import matrix, set_gradients

MUON = functools.partial(MuonCPR, ns_dtype="float64")  # a batch rounds in another order

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "kappa": st.sampled_from(
            [KappaK(0.2), "ki0x0p9", KappaWS(2), "ws4", KappaIP(1, ema=0.5), "ip2"]
        ),
        "regularizer": st.sampled_from(["l2", "l1", "std", "huber", Huber()]),
        "mu": st.sampled_from([0.01, 0.1]),
        "adaptive": st.booleans(),
    },
)


def parts() -> list[list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [[(6, 5), (4,)], [(3, 4, 2)], [(7, 2), (2, 2)]]
    return [
        [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in group]
        for group in shapes
    ]


def train(optimizers: list[Any], params: list[torch.nn.Parameter], first: int, last: int) -> None:
    for t in range(first, last):
        set_gradients(params, t)
        for optimizer in optimizers:
            optimizer.step()


@examples(20, search=200)
@given(
    of_groups=st.tuples(SETTINGS, SETTINGS, SETTINGS),
    build=st.sampled_from([SGDCPR, AdamCPR, MUON]),
    attached=st.booleans(),
    stop=st.integers(0, 7),
)
def test_groups_train_like_optimizers_of_their_own(
    of_groups: tuple[dict[str, Any], ...], build: Callable[..., Any], attached: bool, stop: int
) -> None:
    """Train with and without saving and loading in between."""

    def built(groups: list[dict[str, Any]], **settings: Any) -> Any:
        settings = {"mu": 0.05, **settings}
        if not attached:
            return build(groups, lr=0.05, **settings)
        plain = torch.optim.Adam([p for g in groups for p in g["params"]], lr=0.05)
        return CPR(groups, **settings).attach(plain)

    together, apart = parts(), parts()
    groups = [{"params": ps, **own} for ps, own in zip(together, of_groups)]
    one = built(copy.copy(groups))
    flat = [p for ps in together for p in ps]
    train([one], flat, 0, stop)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    resumed = built(copy.copy(groups))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train([resumed], flat, stop, 9)

    several = [built([{"params": ps}], **own) for ps, own in zip(apart, of_groups)]
    train(several, [p for ps in apart for p in ps], 0, 9)
    for p, q in zip(flat, [p for ps in apart for p in ps]):
        # The multipliers are float32, and a vector of mu is multiplied before the addition.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR, MuonCPR])
def test_unknown_group_key_is_refused(build: type) -> None:
    with pytest.raises(TypeError, match="group 0: unknown key 'kapa'; did you mean 'kappa'"):
        build([{"params": [matrix()], "kapa": 1}])
    of_torch = ("amsgrad", "maximize", "fused", "foreach", "differentiable", "capturable")
    others = {SGDCPR: ("betas",), AdamCPR: ("momentum",), MuonCPR: (*of_torch, "model")}[build]
    for other in others:
        with pytest.raises(TypeError, match=f"group 1: unknown key '{other}'"):
            build([{"params": [matrix()]}, {"params": [matrix()], other: True}])
    build([{"params": [matrix()], "name": "encoder", "initial_lr": 0.1, "lr_scale": 0.5}])
    with pytest.raises(TypeError, match=r"'rho'; for SAM .*attach CPR to it: CPR.*sam\.base_opt"):
        build([{"params": [matrix()], "rho": 0.05}])


def test_a_state_of_other_group_settings_is_refused() -> None:
    groups = [{"params": [matrix()], "mu": 2.0}, {"params": [matrix()]}]
    saved = SGDCPR(copy.deepcopy(groups)).state_dict()
    for other, message in (
        (3.0, r"mu: expected 3\.0, got 1\.0 for '1\.0'"),
        (2.0, "expected 2.0, got 1"),
    ):
        groups[1]["mu"] = other
        with pytest.raises(ValueError, match=message):
            SGDCPR(groups).load_state_dict(saved)


@pytest.mark.parametrize("build", [SGDCPR, AdamCPR])
def test_groups_of_an_optimizer_build_another(build: type) -> None:
    groups = [{"params": [matrix()], "kappa": KappaIP(5, ema=0.5)}, {"params": [matrix()]}]
    first = build(groups, mu=0.5)
    plain = [{key: own[key] for key in ("kappa", "regularizer", "mu")} for own in first.param_groups]
    word = "KappaIP(interval=5, ema=0.5)"
    assert plain == [{"kappa": k, "regularizer": "l2", "mu": 0.5} for k in (word, "ws1000")]
    second = build([{**own} for own in first.param_groups])
    assert second.cpr.settings == first.cpr.settings
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("build", [torch.optim.AdamW, FusedSGD, Muon])
def test_settings_of_an_attached_optimizer_are_saved_as_plain_values(build: Any) -> None:
    settings = {"kappa": KappaIP(3, ema=0.5), "regularizer": Huber(), "mu": 2.0, "adaptive": True}

    def built() -> Any:
        groups = [{"params": [matrix()], **settings}, {"params": [matrix()]}]
        return CPR(groups).attach(build(groups, lr=0.1, weight_decay=0.0))

    optimizer = built()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    built().load_state_dict(torch.load(file, weights_only=True))
    plain = {**settings, "kappa": "KappaIP(interval=3, ema=0.5)", "regularizer": "huber"}
    assert [{k: g[k] for k in plain if k in g} for g in optimizer.param_groups] == [plain, {}]


@pytest.mark.parametrize(
    "settings", [{"kappa": "k5"}, {"mu": 2.0}, {"regularizer": "l1"}, {"adaptive": True}]
)
def test_settings_that_cpr_has_not_read_are_refused(settings: dict[str, Any]) -> None:
    def groups(own: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"params": [params[0]], **own}, {"params": [params[1]]}]

    params = [matrix(), matrix()]
    (key,) = settings
    with pytest.raises(ValueError, match=f"group 0: expected {key}=.*; leave it out, or build CPR"):
        CPR(params).attach(torch.optim.SGD(groups(settings), lr=0.1))
    for late in (False, True):
        optimizer = torch.optim.SGD(groups({}), lr=0.1)
        cpr = CPR(params)
        cpr.attach(optimizer)
        set_gradients(params, 0)
        optimizer.step()
        if late:
            optimizer.add_param_group({"params": [matrix()], **settings})
        else:
            optimizer.param_groups[0].update(settings)
        with pytest.raises(ValueError, match=f"as at construction, got .*{key}"):
            optimizer.step()
        assert cpr.step_count == 1
    optimizer = torch.optim.SGD(groups(settings), lr=0.1)
    CPR(optimizer.param_groups).attach(optimizer)


class WithItsOwnKappa(torch.optim.SGD):
    """Optimizer with a setting by the name of one of CPR's, as AccSGD."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.defaults["kappa"] = 1000.0
        for group in self.param_groups:
            group["kappa"] = 1000.0


def test_setting_of_the_optimizer_itself_is_none_of_cpr() -> None:
    p = matrix()
    optimizer = WithItsOwnKappa([p], lr=0.1)
    cpr = CPR([p], kappa="k0p001")
    cpr.attach(optimizer)
    for kappa in (1000.0, 10.0):
        optimizer.param_groups[0]["kappa"] = kappa
        set_gradients([p], 0)
        optimizer.step()
    assert cpr.kappa.tolist() == [pytest.approx(0.001)] and cpr.step_count == 2
    other = WithItsOwnKappa([p], lr=0.1)
    CPR([p], kappa="k0p001").attach(other)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["kappa"] == 10.0


def test_first_setting_that_differs_is_named() -> None:
    p = matrix()
    optimizer = torch.optim.SGD([{"params": [p], "kappa": "KappaWS(steps=5)", "mu": 3.0}], lr=0.1)
    with pytest.raises(ValueError, match=r"expected mu=1\.0, .*, got 3\.0"):
        CPR([p], kappa="ws5").attach(optimizer)


def test_group_without_settings_may_be_added_to_an_attached_optimizer() -> None:
    params = [matrix(), matrix()]
    optimizer = torch.optim.SGD(params[:1], lr=0.1)
    CPR(params[:1]).attach(optimizer)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:]})
    optimizer.step()


# Spellings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("KappaIP(interval=0)", "KappaIP.interval: expected a positive whole number, got 0"),
        ("KappaIP(interval=5, ema=2)", "KappaIP.ema: expected .*, got 2"),
        ("KappaK(value=-1)", "KappaK.value: expected a positive finite number, got -1"),
        ("k0", r"KappaK.value: expected a positive finite number, got 0\.0"),
        ("KappaIP(step=5)", r"unknown bound 'KappaIP\(step=5\)'; choose from"),
        ("KappaIP()", r"unknown bound 'KappaIP\(\)'; choose from"),
        ("KappaIP(ema=0.5)", "unknown bound"),
        ("KappaIP(interval=open)", "unknown bound"),
    ],
)
def test_number_of_a_bound_that_is_out_of_range_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_bound(text)


@pytest.mark.parametrize(
    ("bound", "word"),
    [
        (KappaWS(1000), "ws1000"),
        (KappaK(0.005), "k5en3"),
        (KappaKI0(2.0), "ki0x2"),
        (KappaIP(50), "ip50"),
        (KappaIP(50, ema=0.25), "KappaIP(interval=50, ema=0.25)"),
    ],
)
def test_every_bound_has_a_word_that_reads_back(bound: Bound, word: str) -> None:
    assert str(bound) == word and as_bound(word) == as_bound(repr(bound)) == bound
    for build in (CPR, SGDCPR, AdamCPR, MuonCPR):
        cpr = build([matrix()], kappa=word)
        assert getattr(cpr, "cpr", cpr).bound == bound
