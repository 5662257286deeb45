"""Tests that need a GPU: agreement with the CPU, synchronization, launches, graphs, mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaIP, KappaKI0, KappaWS, MuonCPR
from nnunet_cpr.cpr.sums import sums_of_squares
from nnunet_cpr.optimizers import FusedAdam, FusedSGD
from tests.helpers.baseline_kinds import KINDS
from tests.helpers.resume_cases import differences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUILDS = [SGDCPR, AdamCPR]


def parameters(count: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(64, 33) if i % 2 else (65,) for i in range(count)]
    params = [torch.randn(s, generator=generator, device="cuda") for s in shapes]
    return [torch.nn.Parameter(p) for p in params]


def set_gradients(params: list[torch.nn.Parameter], t: int) -> None:
    generator = torch.Generator("cuda").manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cuda")


REGULARIZERS = ["l2", "l1", "std", "huber"]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGDCPR": partial(SGDCPR, momentum=0.9),
    "AdamCPR": partial(AdamCPR, eps=1e-3),
    "MuonCPR": partial(MuonCPR, ns_dtype="float32"),
}
PLAIN: dict[str, Callable[..., Any]] = {
    "FusedSGD": partial(FusedSGD, lr=0.02, momentum=0.9),
    "FusedAdam": partial(FusedAdam, lr=0.02, eps=1e-3),
    "SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
}


def attached(kind: str, build: Callable[..., Any], params: list[torch.nn.Parameter]) -> Any:
    return KINDS[kind](params).attach(build(params))


BOUNDS = {"ws": KappaWS(2), "ip": KappaIP(1, ema=0.5), "ki0": KappaKI0(0.9)}
WAYS: dict[str, Callable[..., Any]] = {
    f"{name} {regularizer} {word}": partial(
        build, lr=0.02, kappa=bound, regularizer=regularizer, mu=0.1, adaptive=True
    )
    for name, build in OPTIMIZERS.items()
    for regularizer in REGULARIZERS
    for word, bound in BOUNDS.items()
}
WAYS |= {
    f"{name} {kind}": partial(attached, kind, build) for name, build in PLAIN.items() for kind in KINDS
}


def steps(optimizer: Any, first: int, end: int) -> Any:
    """Take steps whose gradients are the same on each device."""
    for t in range(first, end):
        generator = torch.Generator().manual_seed(100 + t)
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        optimizer.step()
    return optimizer


def matrices(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 33), (65,), (8, 4, 3, 3), (200, 300)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def assert_agree(ours: list[torch.Tensor], theirs: list[torch.Tensor], rtol: float) -> None:
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("way", WAYS)
def test_steps_on_a_gpu_agree_with_the_cpu(way: str) -> None:
    on_gpu, on_cpu = (matrices(device) for device in ("cuda", "cpu"))
    ours, theirs = steps(WAYS[way](on_gpu), 0, 6), steps(WAYS[way](on_cpu), 0, 6)
    assert_agree(on_gpu, on_cpu, 1e-2 if "Muon" in way else 1e-4)
    if "CPR" in way:
        for name in ("kappa", "lagrange_multiplier"):
            assert_agree([getattr(ours.cpr, name)], [getattr(theirs.cpr, name)], 1e-3)


@pytest.mark.parametrize("build", BUILDS)
def test_gradients_of_another_layout_are_stepped(build: type) -> None:
    """Torch's fused kernels refuse them."""
    results = []
    for device in ("cuda", "cpu"):
        p = matrices(device)[2]
        optimizer = build([p], lr=0.02, kappa=KappaKI0(0.9), mu=0.1)
        for t in range(3):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).to(device)
            p.grad = noise.to(memory_format=torch.channels_last)
            optimizer.step()
        results.append(p.detach())
    assert_agree(results[:1], results[1:], 1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("there", ["cuda", "cpu"])
def test_state_moves_between_devices(name: str, there: str) -> None:
    build = partial(OPTIMIZERS[name], lr=0.02, kappa=KappaWS(2), mu=0.1)
    here = "cpu" if there == "cuda" else "cuda"
    before = matrices(here)
    state = steps(build(before), 0, 4).state_dict()
    after = [torch.nn.Parameter(p.detach().to(there)) for p in before]
    moved = build(after)
    moved.load_state_dict(state)
    steps(moved, 4, 8)
    whole = matrices("cpu")
    steps(build(whole), 0, 8)
    assert_agree(after, whole, 1e-2 if name == "MuonCPR" else 1e-4)
    assert moved.cpr.step_count == 8 and moved.cpr.kappa.device.type == there


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_model_over_two_devices_is_regularized(regularizer: str) -> None:
    """Here a GPU and the CPU, in the place of two GPUs."""
    results = []
    for second in ("cuda", "cpu"):
        params = [matrices("cuda")[0], matrices(second)[2], matrices(second)[3]]
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
        steps(CPR(params, KappaKI0(0.9), regularizer, mu=0.1).attach(optimizer), 0, 4)
        results.append(params)
    assert_agree(*results, 1e-4)


@pytest.mark.parametrize("build", BUILDS)
def test_same_run_gives_the_same_bits(build: type) -> None:
    runs = []
    for _ in range(2):
        params = parameters(30)
        optimizer = build(params, lr=0.01, kappa=KappaKI0(0.5), mu=0.01)
        steps(optimizer, 0, 10)
        runs.append([*params, optimizer.cpr.lagrange_multiplier])
    assert differences(*runs) == []
    assert runs[0][-1].max() > 0


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_mixed_precision_with_a_gradient_scaler(
    build: type, fused: bool | None, unscale_first: bool
) -> None:
    """An overflow in step 5 changes nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).cuda()
    optimizer = build(model, lr=1e-3, kappa=KappaWS(2), mu=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for t in range(10):
        data = torch.randn(7, 40, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(data).float().square().mean() * (1e30 if t == 5 else 1.0)
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if t == 5:
            assert differences(list(model.parameters()), [*map(torch.nn.Parameter, before)]) == []
    assert optimizer.cpr.step_count == 9
    assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.cpr.metrics()["skipped_updates"] == 0


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_step_never_synchronizes_with_the_gpu(build: type, regularizer: str) -> None:
    params = parameters(20)
    optimizer = build(params, lr=0.01, kappa=KappaWS(3), regularizer=regularizer, adaptive=True)
    muon = MuonCPR([copy.deepcopy(p) for p in params], lr=0.01, kappa=KappaWS(3))
    hooked = torch.optim.NAdam([copy.deepcopy(p) for p in params], foreach=True)
    CPR(hooked.param_groups[0]["params"], kappa=KappaWS(3), regularizer=regularizer).attach(hooked)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(8):
            set_gradients(params, t)
            set_gradients(hooked.param_groups[0]["params"], t)
            set_gradients(muon.param_groups[0]["params"], t)
            optimizer.step()
            muon.step()
            if t:  # torch's own first step makes its state
                hooked.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.cpr.kappa.isfinite().all()


@pytest.mark.parametrize("build", BUILDS)
def test_mixed_precision_step_never_waits_for_the_gpu(build: type) -> None:
    """In nnU-Net's order: unscale, clip, step."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).cuda()
    optimizer = build(model, lr=1e-3, kappa=KappaWS(2), mu=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for t in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(7, 40, device="cuda")).square().mean() * (1e30 if t == 3 else 1.0)
        scaler.scale(loss).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.cpr.step_count == 5


@pytest.mark.parametrize("shape", [(320, 320, 3, 3, 3), (1000, 3000)])
def test_sums_of_squares_on_a_gpu_are_exact_to_2en6(shape: tuple[int, ...]) -> None:
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = t.double().square().sum()
    assert abs(sums_of_squares([t.cuda()]).cpu() / exact - 1) < 2e-6


@pytest.mark.parametrize("build", BUILDS)
def test_a_further_matrix_costs_one_launch(build: type) -> None:
    def launches(count: int) -> int:
        params = parameters(count)
        optimizer = build(params, lr=0.01, kappa=KappaKI0(0.5), mu=0.01)
        for t in range(3):
            set_gradients(params, t)
            optimizer.step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        return sum("LaunchKernel" in event.name for event in profile.events())

    few, many = launches(20), launches(400)  # half of them are matrices
    assert many <= few + 200, (few, many)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("new_gradients", [False, True])
def test_a_captured_step_is_the_eager_one(build: type, new_gradients: bool) -> None:
    """Capture as in torch's documentation, with gradients allocated in the graph."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).cuda()
        options = {"capturable": True} if build is AdamCPR else {}
        lr = torch.tensor(0.01, device="cuda")
        optimizer = build(model, lr=lr, kappa=KappaKI0(0.9), mu=0.1, **options)
        data = torch.randn(7, 40, device="cuda")

        def iteration(model=model, optimizer=optimizer, data=data) -> None:
            optimizer.zero_grad(set_to_none=new_gradients)
            (-model(data).square().mean()).backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                iteration()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            if new_gradients:
                optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                iteration()
            for _ in range(5):
                graph.replay()
        else:
            for _ in range(5):
                iteration()
        results.append((optimizer, [p.detach().clone() for p in model.parameters()]))
    (eager, expected), (graphed, ours) = results
    for p, q in zip(ours, expected):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(graphed.cpr.lagrange_multiplier, eager.cpr.lagrange_multiplier)
    assert graphed.cpr.step_count == eager.cpr.step_count == 8
