"""Times of a step of `SparseAdamW` and of PyTorch's fused AdamW, on tensors shaped as those of GPT-2.

Only the step is timed. Each step gets new gradients, which are ready before it. Simulated ranks take turns on the
device, so the time of one rank is the total, divided by the number of ranks. It includes encoding and decoding
messages, and copying them between device and host, but not moving them from rank to rank: see `bench.clock`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.clock import Clock
from bench.gpu_training import Setting, model_of
from sparsecomm.torch import SparseAdamW
from sparsecomm.transport import simulated

MODELS = {"124M": (12, 768), "354M": (24, 1024), "985M": (32, 1536)}  # layers, width
WARMUP, ROUNDS = 4, 11
SHIFT = 64  # elements between the beginnings of two gradients
Shapes = dict[str, tuple[int, ...]]


class Times(NamedTuple):
    """Seconds of one rank for each step, and the bytes that a rank sends in a step."""

    seconds: list[float]
    host: list[float]  # until the call returns, when the device may still work
    messages: list[float]  # for moving messages from rank to rank
    sent: float


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a model's parameters."""
    layers, width = MODELS[model]
    with torch.device("meta"):
        parameters = model_of(Setting(layers=layers, width=width)).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def memory(n: int, ranks: int) -> int:
    """Estimate the bytes that steps of ``ranks`` simulated ranks need; with 0 ranks, steps of PyTorch's AdamW."""
    return (9 * ranks + 24) * n * 13 // 10 + (2 << 30)


def measured(shapes: Shapes, ranks: int, device: str) -> Times:
    """Time steps of ``ranks`` simulated ranks; with 0 ranks, steps of PyTorch's AdamW."""
    n, count = sum(map(math.prod, shapes.values())), max(1, ranks) * (WARMUP + ROUNDS + 1)
    torch.manual_seed(0)
    numbers = torch.randn(n + count * SHIFT, device=device)

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    clock = Clock(wait)

    def gradients(number: int) -> Iterator[Any]:
        begin = number * SHIFT
        for shape in shapes.values():
            yield numbers[begin : begin + math.prod(shape)].view(shape)
            begin += math.prod(shape)

    def program(transport: simulated.SimulatedTransport | None) -> Times:
        named = [(name, torch.nn.Parameter(torch.zeros(shape, device=device))) for name, shape in shapes.items()]
        optimizer: Any
        if transport is None:
            optimizer = torch.optim.AdamW([parameter for _, parameter in named], fused=True)
        else:
            clock.watch(transport)
            optimizer = SparseAdamW(named, comm=transport, check_weights_every=None)
        starts, moved, host, before = [], [], [], 0
        for step in range(WARMUP + ROUNDS + 1):
            number = step if transport is None else step * ranks + transport.rank
            for (_, parameter), gradient in zip(named, gradients(number), strict=True):
                parameter.grad = gradient
            if step == WARMUP and transport is not None:
                before = optimizer.reducer.counters.bytes_sent
            starts.append(wait())
            moved.append(clock.messages)
            optimizer.step()
            host.append(time.perf_counter() - starts[-1])
        sent = 0 if transport is None else optimizer.reducer.counters.bytes_sent - before
        messages, seconds = np.diff(moved[WARMUP:]), np.diff(starts[WARMUP:])
        return Times((seconds - messages).tolist(), host[WARMUP:-1], messages.tolist(), sent / (ROUNDS + 1))

    if not ranks:
        return program(None)
    results = [result.value for result in simulated.run(ranks, program) if result.value is not None]
    seconds, host, messages, _ = results[0]
    one = [[time_of_all / ranks for time_of_all in times] for times in (seconds, messages)]
    return Times(one[0], host, one[1], fmean(times.sent for times in results))
