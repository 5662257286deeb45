"""Tests that need a GPU: synchronization, kernel launches, CUDA graphs, mixed precision."""

from __future__ import annotations

import copy

import pytest
import torch

from nnunet_cpr import CPR, SGDCPR, AdamCPR, KappaKI0, KappaWS, MuonCPR

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


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("regularizer", ["l2", "l1", "std", "huber"])
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
    assert optimizer._backend is not None or regularizer != "l2"
    assert optimizer.cpr.kappa.isfinite().all()


@pytest.mark.parametrize("build", BUILDS)
def test_launches_do_not_grow_with_the_number_of_matrices(build: type) -> None:
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

    few, many = launches(20), launches(400)
    assert many <= few + 4, (few, many)  # torch's own count of Adam's steps takes them in hundreds


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
