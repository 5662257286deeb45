"""Interleaved measurements of time and memory, so that drift of the machine favors none."""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch.optim import Optimizer

from benchmarks.competitors import Competitor, Named
from benchmarks.shapes import Shapes


@dataclass
class Timing:
    """Times and memory of a competitor: medians over the rounds, with ratios within a round."""

    milliseconds: float
    ratio: float
    ratio_low: float
    """First quartile of the ratio."""
    ratio_high: float
    """Third quartile."""
    rounds: int
    host_milliseconds: float | None = None
    """Time until the call returns, where :attr:`milliseconds` is the time on a GPU."""
    kept_bytes: int | None = None
    """Memory kept between steps, minus that of the base."""
    temporary_bytes: int | None = None
    """Peak of the memory that a step allocates and frees."""


Clock = Callable[[Callable[[], Any]], float]
"""Function that runs an action and returns its time in seconds."""


def processor_time(action: Callable[[], Any]) -> float:
    """Return the processor time of this thread, which other programs disturb less."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def wall_time(action: Callable[[], Any]) -> float:
    """Return the time until an action and all work of a GPU are done."""
    is_on_gpu = torch.cuda.is_initialized()
    if is_on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if is_on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def host_time(action: Callable[[], Any]) -> float:
    """Return the time until the call of an action returns, while an idle GPU begins its work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class GPUTime:
    """Time on the GPU of an action, as in a training in which the host is ahead of the GPU.

    A kernel that sleeps keeps the GPU busy while the host prepares the action. An action that waits for
    the GPU has its waiting time counted, too.
    """

    CYCLES_PER_SECOND = 2.5e9
    """More than the clock rate of a GPU, so that it sleeps long enough."""

    def __init__(self, host_seconds: float) -> None:
        self._cycles = int(self.CYCLES_PER_SECOND * (2 * host_seconds + 1e-3))

    def __call__(self, action: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(self._cycles)
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def in_turn(
    actions: Mapping[str, Callable[[], Any]],
    base: str,
    seconds: float,
    least: int = 7,
    most: int = 200,
    clock: Clock | Mapping[str, Clock] = wall_time,
) -> dict[str, Timing]:
    """Time each action once a round, in random order, until the time is over.

    Args:
        actions: functions to time, by name.
        base: name of the reference of the ratios.
        seconds: duration of the measurement.
        least: minimum number of rounds.
        most: maximum number of rounds.
        clock: what is measured of an action, or of each action by its name.
    """
    for action in actions.values():
        for _ in range(min(3, least)):
            action()
    clocks = clock if isinstance(clock, Mapping) else dict.fromkeys(actions, clock)
    times: dict[str, list[float]] = {name: [] for name in actions}
    order = list(actions)
    shuffle = random.Random(0).shuffle
    end = time.monotonic() + seconds
    enabled = gc.isenabled()
    gc.disable()
    try:
        while len(times[base]) < least or (time.monotonic() < end and len(times[base]) < most):
            shuffle(order)
            for name in order:
                times[name].append(clocks[name](actions[name]))
    finally:
        if enabled:
            gc.enable()
    return {name: _timing(times[name], times[base]) for name in actions}


def gpu_steps_in_turn(
    steps: Mapping[str, Callable[[], Any]], base: str, seconds: float, least: int
) -> dict[str, Timing]:
    """Time the optimizer steps on a GPU as :func:`in_turn`, and the host's part of each."""
    for step in steps.values():
        for _ in range(3):
            step()
    host = {name: statistics.median(host_time(step) for _ in range(5)) for name, step in steps.items()}
    clocks = {name: GPUTime(seconds) for name, seconds in host.items()}
    timings = in_turn(steps, base, seconds, least, clock=clocks)
    for name, timing in timings.items():
        timing.host_milliseconds = 1e3 * host[name]
    return timings


def _timing(times: list[float], base: list[float]) -> Timing:
    ratios = [t / b for t, b in zip(times, base)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Timing(1e3 * statistics.median(times), middle, low, high, len(times))


def parameters(shapes: Shapes, device: str) -> Named:
    """Return named parameters with small random values."""
    generator = torch.Generator(device).manual_seed(0)
    named = []
    for name, shape in shapes:
        p = torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator, device=device))
        named.append((name, p))
    return named


def gradients(shapes: Shapes, device: str) -> list[torch.Tensor]:
    """Return gradients, which all competitors share because steps only read them."""
    generator = torch.Generator(device).manual_seed(1)
    return [1e-3 * torch.randn(shape, generator=generator, device=device) for _, shape in shapes]


def step_times(
    competitors: list[Competitor], base: str, shapes: Shapes, device: str, seconds: float, least: int
) -> dict[str, Timing]:
    """Return the times of the competitors' optimizer steps, each on its own parameters.

    On a GPU they are its own times; those of the host are separate.
    """
    grads = gradients(shapes, device)
    steps: dict[str, Callable[[], Any]] = {}
    for competitor in competitors:
        named = parameters(shapes, device)
        for (_, p), grad in zip(named, grads):
            p.grad = grad
        steps[competitor.name] = competitor.build(named).step
    measure = gpu_steps_in_turn if device == "cuda" else in_turn
    return measure(steps, base, seconds, least)


def memory(competitor: Competitor, shapes: Shapes, device: str) -> tuple[int, int]:
    """Return the bytes that an optimizer keeps, and the peak of what a step allocates on top."""
    grads = gradients(shapes, device)
    named = parameters(shapes, device)
    for (_, p), grad in zip(named, grads):
        p.grad = grad
    built: list[Optimizer] = []

    def begin() -> None:
        built.append(competitor.build(named))
        for _ in range(3):
            built[0].step()

    kept = _allocated(begin, device)[0]
    return kept, _allocated(built[0].step, device)[1]


def _allocated(action: Callable[[], Any], device: str) -> tuple[int, int]:
    """Return the bytes that an action has allocated at its end, and at most."""
    gc.collect()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
        gc.collect()
    events = profile.profiler.kineto_results.events()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and "CPU" in str(event.device_type())
    ]
    total = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        total += change
        peak = max(peak, total)
    return total, peak


def require_device(device: str) -> None:
    """Check that a device is available.

    Raises:
        typer.BadParameter: the device is neither ``cpu`` nor an available ``cuda``.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device: expected cpu or an available cuda, got {device!r}")


def machine(device: str) -> dict[str, Any]:
    """Return the processor, the number of cores and threads, the load and the versions."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            processor = next((x.split(":")[1].strip() for x in lines if "model name" in x), processor)
    info: dict[str, Any] = {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        info |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30)}
    return info


def free_bytes(device: str) -> int:
    """Return the free memory in bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    return 8 * 2**30


def as_json(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Return the timings as dicts, for :func:`json.dumps`."""
    return {name: asdict(timing) for name, timing in timings.items()}
