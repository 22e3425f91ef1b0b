"""One rank of the emulated sites: rounds of local steps, whose computation is slept. `bench.utilisation` starts it.

    python worker.py PLAN.json RESULTS.jsonl

The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun. Rank 0 writes a line for each cell
of the plan as soon as it is measured. The ranks share the machine's clock, so they start at a common moment, and times
contain no barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import sparsecomm as sc

SPREAD = 8  # a step changes one of at least 8 parts of the parameters
LIMIT = timedelta(minutes=30)
Vector = NDArray[np.float32]
Cell = dict[str, Any]


class Training:
    """A model with flat parameters and named tensors, whose steps sleep.

    `begin` changes all parameters, so that residuals are non-zero everywhere. A step changes only a part of the
    parameters, because changing all would take longer than the step. It also changes the first element of every tensor,
    because a rank sends nothing of a tensor that has not changed. Ranks use different random numbers.
    """

    def __init__(self, shapes: dict[str, int], rank: int, seconds: float) -> None:
        self.seconds, n = seconds, sum(shapes.values())
        self.flat = np.zeros(n, np.float32)
        self.change = np.random.default_rng(rank).standard_normal(n, np.float32)
        ends = np.cumsum(list(shapes.values()))
        parts = np.split(self.flat, ends[:-1])
        self._first = ends - list(shapes.values())  # the index of each tensor's first element
        self.parameters = dict(zip(shapes, parts, strict=True))
        self.gradients = dict(zip(shapes, np.split(self.change, ends[:-1]), strict=True))
        self._taken = 0

    def begin(self) -> None:
        """Change all parameters."""
        self.flat -= self.change

    def step(self, every: int) -> None:
        """Take a local step of rounds of ``every``."""
        end = time.perf_counter() + self.seconds
        parts = max(every, SPREAD)
        part = self._taken % parts
        self._taken += 1
        begin, stop = (len(self.flat) * i // parts for i in (part, part + 1))
        self.flat[begin:stop] -= self.change[begin:stop]
        self.flat[self._first] -= self.change[self._first]
        time.sleep(max(0.0, end - time.perf_counter()))


class Dense:
    """Local steps whose differences gloo averages densely, in one call."""

    def __init__(self, training: Training, cell: Cell) -> None:
        self._training, self._every, self._taken = training, cell["H"], 0
        self._global = torch.from_numpy(training.flat.copy())
        self._local = torch.from_numpy(training.flat)
        self._difference = torch.empty_like(self._global)

    def warm_up(self) -> None:
        """Connect, and open TCP's windows with a 32nd of the data, because a complete round may take minutes."""
        part = self._difference[: max(1, len(self._difference) // 32)]
        part.zero_()
        dist.all_reduce(part)

    def step(self) -> None:
        self._taken += 1
        if self._taken % self._every == 0:
            torch.sub(self._global, self._local, out=self._difference)
            dist.all_reduce(self._difference)
            self._global.sub_(self._difference, alpha=1 / dist.get_world_size())
            self._local.copy_(self._global)

    def outcome(self) -> tuple[int, Cell]:
        return zlib.crc32(self._global.numpy().data), {}


class Local:
    """The library's local steps, with its defaults or with the options of the cell."""

    def __init__(self, training: Training, cell: Cell) -> None:
        self._training, self._every = training, cell["H"]
        self._local = sc.LocalSteps(training.parameters, sync_every=cell["H"], **cell.get("options", {}))

    def warm_up(self) -> None:
        self._training.begin()
        for _ in range(2 * self._every):
            self._training.step(self._every)
            self.step()

    def step(self) -> None:
        self._local.step(self._training.parameters)

    def outcome(self) -> tuple[int, Cell]:
        checksum = 0
        for parameter in self._local.global_parameters().values():
            checksum = zlib.crc32(np.ascontiguousarray(parameter).data, checksum)
        return checksum, _counted(self._local.reducers, self._local.round)


class PerStep:
    """A sparse mean of gradients in every step, by a `Reducer`."""

    def __init__(self, training: Training, cell: Cell) -> None:
        self._training, self._steps, self._sum = training, 0, 0
        self._gradients = training.gradients
        self._means = {name: np.empty_like(gradient) for name, gradient in self._gradients.items()}
        self._reducer = sc.Reducer(self._gradients, cell["density"], algorithm="fastest")

    def warm_up(self) -> None:
        for _ in range(2):  # buckets are filled anew after the first
            self.step()

    def step(self) -> None:
        for name, gradient in self._gradients.items():
            self._reducer.push(name, gradient, self._means[name])
        self._reducer.wait()
        self._steps += 1

    def outcome(self) -> tuple[int, Cell]:
        checksum = 0
        for mean in self._means.values():
            checksum = zlib.crc32(mean.data, checksum)
        return checksum, _counted([self._reducer], self._steps)


METHODS: dict[str, Callable[[Training, Cell], Dense | Local | PerStep]] = {
    "dense": Dense,
    "local": Local,
    "per-step": PerStep,
}


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    for cell in plan["cells"]:
        row = measured(plan, cell)
        if dist.get_rank() == 0:
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps(cell | row) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measured(plan: dict[str, Any], cell: Cell) -> Cell:
    """Measure whole rounds after a warm-up: one, and as many more as fill ``plan["seconds"]``. Collective."""
    every = cell["H"]
    training = Training(plan["shapes"], dist.get_rank(), plan["step"])
    method = METHODS[cell["kind"]](training, cell)
    method.warm_up()
    min_s, max_s = plan["seconds"]
    rounds, seconds, cpu = 0, 0.0, 0.0
    load = os.getloadavg()[0]
    while True:
        left = 1 if rounds == 0 else round((min_s - seconds) / (seconds / rounds))
        left = agreed(min(max(left, 3 - rounds), int((max_s - seconds) / (seconds / rounds))) if rounds else 1)
        if left <= 0:
            break
        begin_together(plan["ahead"])
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(left * every):
            training.step(every)
            method.step()
        seconds += time.perf_counter() - begin
        cpu += time.process_time() - busy
        rounds += left
    checksum, more = method.outcome()
    every_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, (seconds, cpu, checksum))
    if len({crc for *_, crc in every_rank}) > 1:
        raise RuntimeError(f"{cell}: the results differ between ranks")
    slowest = max(seconds for seconds, *_ in every_rank)
    computed = rounds * every * training.seconds
    return {
        "rounds": rounds,
        "round_s": slowest / rounds,
        "exchange_s": (slowest - computed) / rounds,
        "utilisation": float(np.mean([computed / seconds for seconds, *_ in every_rank])),
        "busy": sum(cpu for _, cpu, _ in every_rank) / (slowest * (os.cpu_count() or 1)),
        "load": load,
        **more,
    }


def agreed(value: int) -> int:
    """Return the value of rank 0."""
    shared = torch.tensor([value])
    dist.broadcast(shared, 0)
    return int(shared)


def begin_together(ahead: float) -> None:
    """Wait until a common moment, ``ahead`` seconds from now on rank 0. Collective."""
    moment = torch.tensor([time.monotonic() + ahead], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, float(moment) - time.monotonic()))


def _counted(reducers: Any, rounds: int) -> Cell:
    """Return the bytes that rank 0 sent per round."""
    return {"sent": sum(reducer.counters.bytes_sent for reducer in reducers) / max(1, rounds)}


if __name__ == "__main__":
    sys.exit(main())
