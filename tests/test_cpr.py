"""CPR on an optimizer: attaching, odd steps, numbers that are not finite, state."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaK, KappaKI0, KappaWS
from nnunet_cpr.bounds import Bound


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


def matrix(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.full((2, 3), value, dtype=dtype))
    p.grad = torch.zeros_like(p)
    return p


# Attaching


def test_hook_on_a_plain_optimizer_equals_the_subclass(model: torch.nn.Module) -> None:
    twin = copy.deepcopy(model)
    ours = AdamCPR(model, lr=1e-2, kappa=KappaWS(3))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0, fused=True)
    assert CPR(twin, kappa=KappaWS(3)).attach(plain) is plain
    for t in range(20):
        set_gradients(model, t)
        set_gradients(twin, t)
        ours.step()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert ours.cpr.lagrange_multiplier.max() > 0


def test_subclasses_are_torchs_own() -> None:
    assert issubclass(SGDCPR, torch.optim.SGD) and issubclass(AdamCPR, torch.optim.Adam)


def test_works_with_torchs_schedulers(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    set_gradients(model, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_attaching_twice_is_refused(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cpr = CPR(model)
    cpr.attach(optimizer)
    with pytest.raises(RuntimeError, match="attached already"):
        cpr.attach(optimizer)
    with pytest.raises(RuntimeError, match="another CPR"):
        CPR(model).attach(optimizer)
    cpr.detach()
    CPR(model).attach(optimizer)


def test_optimizer_without_the_parameters_is_refused(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold '2\.weight', '4\.weight'"):
        CPR(model).attach(optimizer)


def test_optimizer_with_its_own_decay_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"weight decay to '0\.weight'.*weight_decay=0"):
        CPR(model).attach(torch.optim.AdamW(model.parameters()))
    # On parameters that CPR leaves alone it may decay.
    biases = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": biases, "weight_decay": 0.1}, {"params": matrices, "weight_decay": 0}]
    CPR(model).attach(torch.optim.AdamW(groups))


def test_weight_decay_that_comes_later_is_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    set_gradients(model, 0)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="its own weight decay"):
        optimizer.step()
    assert optimizer.cpr.step_count == 0


def test_parameters_that_come_later_are_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    with pytest.raises(RuntimeError, match="build it with all parameters"):
        optimizer.add_param_group({"params": [matrix()]})
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_stay_in_the_optimizer(model: torch.nn.Module) -> None:
    model[0].requires_grad_(False)
    optimizer = SGDCPR(model, lr=0.1)
    assert optimizer.cpr.names == ["2.weight", "4.weight"]
    model[0].requires_grad_(True)
    before = model[0].weight.clone()
    set_gradients(model, 0)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(1, 1)])
def test_attaching_to_what_is_no_optimizer_changes_nothing(model: torch.nn.Module, wrong) -> None:
    cpr = CPR(model)
    with pytest.raises(TypeError, match="cannot attach to a"):
        cpr.attach(wrong)
    cpr.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_sparse_gradients_of_embeddings_work() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 2))
    optimizer = SGDCPR(model, lr=0.1, momentum=0, nesterov=False)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
def test_the_way_of_a_gpu_gives_the_same(regularizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where coefficients stay on the device, every matrix is corrected, by 0 if by nothing."""

    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((4, 3), (2, 2, 3))]
        params.append(torch.nn.Parameter(torch.full((2, 3), 2.0)))
        optimizer = SGDCPR(params, lr=0.1, kappa=KappaKI0(0.99), regularizer=regularizer, mu=0.01)
        for t in range(20):
            for p in params:
                p.grad = -0.1 * p.detach().nan_to_num(posinf=2.0)  # growing
            if t == 10:
                params[2].detach()[0, 0] = math.inf
            optimizer.step()
        return params, optimizer.cpr.lagrange_multiplier

    ours, multipliers = run()
    monkeypatch.setattr("nnunet_cpr.regularizers._readable", lambda values: values.unbind())
    theirs, others = run()
    torch.testing.assert_close(multipliers, others)
    assert multipliers[:2].max() > 0
    for p, q in zip(ours[:2], theirs[:2]):
        torch.testing.assert_close(p, q)
    assert theirs[2][0, 1:].isfinite().all() and ours[2][0, 1:].isfinite().all()


def test_detached_cpr_does_nothing(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.0, momentum=0, nesterov=False, kappa=KappaK(1e-9))
    optimizer.cpr.detach()
    before = model[0].weight.clone()
    set_gradients(model, 0)
    optimizer.step()
    assert torch.equal(model[0].weight, before) and "cpr" not in optimizer.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": 0}, "mu must be positive"),
        ({"mu": -1.0}, "mu must be positive"),
        ({"mu": math.nan}, "mu must be a finite number"),
        ({"mu": "1"}, "mu must be a finite number"),
        ({"regularizer": "l3"}, "no measure is named 'l3'; the measures are 'l2', 'l1'"),
    ],
)
def test_wrong_settings_are_refused(model: torch.nn.Module, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPR(model, **settings)


def test_a_bound_must_be_a_bound(model: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match=r"kappa must be a bound such as KappaWS\(1000\), got 1000"):
        CPR(model, kappa=1000)  # type: ignore[arg-type]


def test_optimizers_are_not_copied_without_their_cpr(model: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(SGDCPR(model, lr=0.1))


# Steps


def test_the_measure_and_the_correction_read_the_point_before_the_step() -> None:
    p = matrix(2.0)
    p.grad = torch.ones_like(p)
    optimizer = SGDCPR([p], lr=0.5, momentum=0, nesterov=False, kappa=KappaK(3.9))
    optimizer.step()
    lam = 2.0**2 - 3.9
    torch.testing.assert_close(p.data, torch.full((2, 3), 2.0 - 0.5 - lam * 2 * 2.0))


def test_a_closure_is_evaluated_before_the_correction() -> None:
    """The gradient belongs to theta_t, not to the corrected point."""
    results = []
    for use in (None, "position", "keyword"):  # Lightning names it
        p = matrix(2.0)
        optimizer = SGDCPR([p], lr=0.1, momentum=0, nesterov=False, kappa=KappaK(3.9))

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p**3).sum()
            loss.backward()
            return loss

        for _ in range(3):
            if use == "position":
                assert optimizer.step(closure) is not None
            elif use == "keyword":
                assert optimizer.step(closure=closure) is not None
            else:
                closure()
                optimizer.step()
        assert optimizer.cpr.step_count == 3
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_an_optimizer_that_calls_its_closure_often_is_corrected_once_a_step() -> None:
    p = matrix(2.0)
    optimizer = torch.optim.LBFGS([p], lr=1e-3, max_iter=5)
    cpr = CPR([p], kappa=KappaK(3.9))
    cpr.attach(optimizer)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (p**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls > 1 and cpr.step_count == 1


def test_without_a_gradient_everything_is_left_alone() -> None:
    p, q = matrix(2.0), matrix(2.0)
    optimizer = SGDCPR([p, q], lr=0.1, kappa=KappaK(3.0))
    optimizer.step()
    lam = optimizer.cpr.lagrange_multiplier
    before = q.clone()
    q.grad = None
    optimizer.step()
    after = optimizer.cpr.lagrange_multiplier
    assert torch.equal(q, before) and after[1] == lam[1]
    assert after[0] != lam[0]
    assert optimizer.cpr.metrics()["skipped_updates"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
def test_a_parameter_that_is_not_finite_does_not_poison_its_multiplier(
    bad: float, regularizer: str
) -> None:
    p, q = matrix(2.0), matrix(2.0)
    p.detach()[0, 0] = q.detach()[0, 0] = 2.5
    optimizer = SGDCPR([p, q], lr=0.0, kappa=KappaK(0.1), regularizer=regularizer, mu=0.01)
    optimizer.step()
    lam = optimizer.cpr.lagrange_multiplier
    p.detach()[0, 0] = bad
    optimizer.step()
    after = optimizer.cpr.lagrange_multiplier
    assert after[0] == lam[0] and after[1] > lam[1]
    assert optimizer.cpr.metrics()["skipped_updates"] == 1
    assert torch.isfinite(p[1]).all()


def test_a_gradient_that_is_not_finite_is_counted_when_it_has_broken_the_parameter() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.1, kappa=KappaK(3.9))
    p.grad.fill_(math.nan)
    optimizer.step()
    lam = optimizer.cpr.lagrange_multiplier
    assert lam.isfinite().all()
    optimizer.step()
    assert torch.equal(optimizer.cpr.lagrange_multiplier, lam)
    assert optimizer.cpr.metrics()["skipped_updates"] == 1


def test_a_warm_start_that_meets_a_number_that_is_not_finite_waits_for_the_next() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaWS(1))
    optimizer.step()
    p.detach()[0, 0] = math.nan
    optimizer.step()
    assert optimizer.cpr.kappa.isinf().all()
    p.detach()[0, 0] = 2.0
    optimizer.step()
    assert optimizer.cpr.kappa.item() == pytest.approx(4.0)


def test_l2_never_flips_a_sign_and_says_so() -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.0, kappa=KappaK(1.0))
    optimizer.step()  # lambda = 3, far above 1/2
    assert torch.equal(p, torch.zeros_like(p))
    assert optimizer.cpr.lagrange_multiplier.item() == pytest.approx(3.0)
    assert optimizer.cpr.metrics()["limited_corrections"] == 1


@pytest.mark.parametrize("unscale_first", [False, True], ids=["", "unscale"])  # nnU-Net does
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_step_that_the_gradient_scaler_skips_is_no_step(fused: bool, unscale_first: bool) -> None:
    p = matrix(2.0)
    optimizer = SGDCPR([p], lr=0.1, kappa=KappaIP(1), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(gradient: float) -> None:
        optimizer.zero_grad()
        scaler.scale((p * gradient).sum()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    before = optimizer.cpr.state_dict()["state"]
    value = p.clone()
    step(math.inf)
    after = optimizer.cpr.state_dict()["state"]
    assert torch.equal(p, value)
    for key, tensor in before.items():
        assert torch.equal(tensor.nan_to_num(-1.0), after[key].nan_to_num(-1.0)), key
    step(1.0)
    assert optimizer.cpr.step_count == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_is_float32_whatever_the_parameters_are(dtype: torch.dtype) -> None:
    p = matrix(2.0, dtype)
    optimizer = AdamCPR([p], kappa=KappaK(3.99))
    optimizer.step()
    cpr = optimizer.cpr
    assert {t.dtype for t in (cpr.kappa, cpr.lagrange_multiplier, cpr.measure)} == {torch.float32}
    assert cpr.lagrange_multiplier.item() == pytest.approx(0.01, rel=1e-4)


def test_channels_last_and_other_strides_give_the_same() -> None:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    measures = []
    for y in (x.clone(), x.to(memory_format=torch.channels_last), x.transpose(0, 3)):
        p = torch.nn.Parameter(y)
        p.grad = torch.zeros_like(p)
        optimizer = SGDCPR([p], lr=0.0, kappa=KappaK(0.5))
        optimizer.step()
        measures.append(optimizer.cpr.measure.item())
    assert measures == pytest.approx([measures[0]] * 3, rel=1e-5)


def test_small_half_precision_weights_are_measured() -> None:
    for regularizer, expected in (("l2", 1e-8), ("huber", 5e-9), ("l1", 1e-4)):
        p = torch.nn.Parameter(torch.full((100, 100), 1e-4, dtype=torch.float16))
        measure = CPR([p], regularizer=regularizer).measure.item()
        assert measure == pytest.approx(expected, rel=1e-2)


def test_a_bound_of_zero_does_not_hide_the_others() -> None:
    p, zero = matrix(2.0), matrix(0.0)
    optimizer = SGDCPR([p, zero], lr=0.0, kappa=KappaKI0(1.0))
    optimizer.step()
    assert optimizer.cpr.metrics()["measure_to_kappa"] == pytest.approx(1.0)


def test_metrics_say_what_happened(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1, kappa=KappaWS(1))
    first = optimizer.cpr.metrics()
    assert math.isnan(first["measure_to_kappa"]) and first["bounded"] == 0
    for t in range(5):
        set_gradients(model, t)
        optimizer.step()
    last = optimizer.cpr.metrics()
    assert last["bounded"] == 1 and last["active"] > 0
    assert last["measure_to_kappa"] > 1
    assert last["lagrange_multiplier_max"] >= last["lagrange_multiplier_mean"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_state_follows_the_model_to_another_device(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1, kappa=KappaWS(1))
    model.cuda()
    for t in range(3):
        set_gradients(model, t)
        optimizer.step()
    assert optimizer.cpr.kappa.device.type == "cuda" and optimizer.cpr.kappa.isfinite().all()


# State

BOUND = st.one_of(
    st.builds(KappaK, st.floats(1e-4, 1.0)),
    st.builds(KappaKI0, st.floats(0.5, 1.5)),
    st.builds(KappaWS, st.integers(1, 12)),
    st.builds(KappaIP, st.integers(1, 4), st.sampled_from([0.0, 0.5])),
)


@settings(max_examples=60, deadline=None)
@given(
    bound=BOUND,
    regularizer=st.sampled_from(["l2", "l1", "std", "huber"]),
    adaptive=st.booleans(),
    adam=st.booleans(),
    stop=st.integers(0, 15),
)
def test_a_resumed_run_is_bit_identical(
    bound: Bound, regularizer: str, adaptive: bool, adam: bool, stop: int
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        cls = AdamCPR if adam else SGDCPR
        settings = {"kappa": bound, "regularizer": regularizer, "mu": 0.1, "adaptive": adaptive}
        return model, cls(model, lr=0.01, **settings)

    model, optimizer = build()
    saved = io.BytesIO()
    for t in range(16):
        if t == stop:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        set_gradients(model, t)
        optimizer.step()

    resumed, other = build()
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    for t in range(stop, 16):
        set_gradients(resumed, t)
        other.step()
    for p, q in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(p, q)
    mine, theirs = optimizer.cpr.state_dict(), other.cpr.state_dict()
    for key, value in mine["state"].items():
        assert torch.equal(value.nan_to_num(-1.0), theirs["state"][key].nan_to_num(-1.0)), key


def test_state_goes_by_name_not_by_order(model: torch.nn.Module) -> None:
    named = list(model.named_parameters())
    optimizer = SGDCPR(named, lr=0.1, kappa=KappaWS(1))
    for t in range(3):
        set_gradients(model, t)
        optimizer.step()
    turned = CPR(reversed(named), kappa=KappaWS(1))
    turned.load_state_dict(optimizer.cpr.state_dict())
    assert turned.names == optimizer.cpr.names[::-1]
    assert torch.equal(turned.kappa, optimizer.cpr.kappa.flip(0))


def test_a_compiled_models_names_are_the_plain_ones(model: torch.nn.Module) -> None:
    assert CPR(torch.compile(model)).names == CPR(model).names
    assert CPR(torch.compile(model).named_parameters()).names == CPR(model).names
    parts = torch.nn.Sequential(torch.compile(model[0]), *model[1:])
    assert CPR(parts).names == CPR(model).names
    assert CPR(torch.nn.DataParallel(model)).names == CPR(model).names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update(kappa="KappaWS(steps=7)"), r"kappa was 'KappaWS\(steps=7\)'"),
        (lambda s: s["config"].update(regularizer="l1"), "regularizer was 'l1' and is 'l2' now"),
        (lambda s: s["config"].update(mu=2.0), "mu was 2.0 and is 1.0 now"),
        (lambda s: s["names"].__setitem__(0, "x"), r"it lacks '0\.weight' and it has 'x', which is not"),
        (lambda s: s["shapes"].__setitem__(0, [1, 2]), r"'0\.weight' had shape \[1, 2\]"),
        (lambda s: s["shapes"].__setitem__(0, 3), r"'0\.weight' had shape 3"),
        (lambda s: s["shapes"].pop(), "'shapes' is damaged"),
        (lambda s: s["state"].pop("kappa"), "'kappa' is damaged"),
        (
            lambda s: s["state"]["lagrange_multiplier"].fill_(math.nan),
            "'lagrange_multiplier' is damaged",
        ),
        (lambda s: s["state"]["kappa"].fill_(-1), "'kappa' is damaged"),
        (lambda s: s.update(shapes=None), "'shapes' is damaged"),
        (lambda s: s.update(version=0), "it has version 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(
    model: torch.nn.Module, change, message: str
) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    set_gradients(model, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    change(state["cpr"])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"cannot load the CPR state: .*{message}"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["cpr"]["config"] == before["cpr"]["config"]
    assert torch.equal(after["cpr"]["state"]["step"], before["cpr"]["state"]["step"])


def test_an_optimizer_state_that_torch_refuses_leaves_cpr_as_it_was(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    state = optimizer.state_dict()
    state["cpr"]["state"]["step"] += 5
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(state)
    assert optimizer.cpr.step_count == 0


def test_a_state_without_cpr_is_refused(model: torch.nn.Module) -> None:
    optimizer = SGDCPR(model, lr=0.1)
    state = optimizer.state_dict()
    del state["cpr"]
    with pytest.raises(ValueError, match="saved without CPR"):
        optimizer.load_state_dict(state)


def test_a_stock_optimizer_ignores_the_extra_entry(model: torch.nn.Module) -> None:
    ours = AdamCPR(model, lr=0.1)
    set_gradients(model, 0)
    ours.step()
    stock = torch.optim.Adam(model.parameters(), lr=0.1)
    stock.load_state_dict(ours.state_dict())
    for p in model.parameters():
        assert torch.equal(stock.state[p]["exp_avg"], ours.state[p]["exp_avg"])
