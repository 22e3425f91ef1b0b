"""Does training with local steps reach the same loss if the workers are not equally fast?

    python -m bench.experiments.local_steps_uneven                 # a quarter of an hour
    python -m bench.experiments.local_steps_uneven --seeds 0 --sync-every 5 --speeds 1 1 1 4

P workers train a small transformer on English text, each on its own share of the data, by AdamW, on simulated ranks
with `sparsecomm.LocalSteps` and its defaults. A local step takes ``--speeds`` units of virtual time; exchanges
take none. Workers take equally many local steps, or local steps by speed. Both runs have the same number of rounds
and, with the default numbers, of local steps "in all"; with other numbers a worker may take one more or less per round.
"Computing" is the share of the time in which the average worker does not wait. The last line is the difference of the
losses over the seeds: negative if local steps by speed reach a lower loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

import sparsecomm as sc
from bench import report
from bench.experiments.tasks import TRANSFORMERS
from bench.experiments.trainer import Worker
from sparsecomm.transport import simulated

TASK = TRANSFORMERS["transformer"]
RATE = 0.006  # of AdamW; it rises for `WARM` steps of a worker, then falls to a twentieth
WARM = 50
SOME = 512  # held-out samples for the loss


@dataclass(frozen=True)
class Setting:
    """A training."""

    speeds: tuple[float, ...]  # units of time of a local step, by worker
    by_speed: bool  # whether faster workers take more local steps
    sync_every: int  # local steps per round, on average over the workers; rounds; of weights and batches
    rounds: int
    seed: int


def train(setting: Setting) -> dict[str, Any]:
    """Return the held-out loss in nats, local steps by worker, virtual time, and the share of it without waits."""
    results = simulated.run(len(setting.speeds), lambda transport: work(setting, transport))
    outcomes = [result.value for result in results if result.value is not None]
    time, steps = max(result.seconds for result in results), [outcome["steps"] for outcome in outcomes]
    busy = fmean(n * unit for n, unit in zip(steps, setting.speeds, strict=True))
    return {"loss": outcomes[0]["loss"], "steps": steps, "time": time, "computing": busy / time}


def work(setting: Setting, transport: simulated.SimulatedTransport) -> dict[str, Any]:
    """Run one worker."""
    worker = Worker(TASK.build, TASK.data, transport.rank, transport.size, setting.seed)
    matrices = [p for p in worker.model.parameters() if p.dim() > 1]
    others = [p for p in worker.model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), foreach=False)
    parameters = worker.parameters
    local = sc.LocalSteps(parameters, sync_every=setting.sync_every, by_speed=setting.by_speed, comm=transport)
    while local.round < setting.rounds:
        done = (local.round + local.local_step / local.steps[transport.rank]) / setting.rounds
        rate = RATE * min(1.0, (worker.steps_taken + 1) / WARM) * (0.525 + 0.475 * math.cos(math.pi * done))
        worker.step(optimizer, rate, math.sqrt(transport.size))
        transport.compute(setting.speeds[transport.rank])
        local.step(parameters)
    return {"steps": worker.steps_taken, "loss": worker.loss(SOME) if transport.rank == 0 else None}


def main() -> None:
    parser = report.parser(__doc__)
    speeds = [1.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    parser.add_argument("--speeds", type=float, nargs="+", default=speeds, help="units of a local step (%(default)s)")
    parser.add_argument("--sync-every", type=int, default=17, help="local steps per round (%(default)s)")
    parser.add_argument("--steps", type=int, default=867, help="local steps of a worker, on average (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(%(default)s)")
    options = parser.parse_args()
    rounds = options.steps // options.sync_every
    rows = []
    for by_speed in (False, True):
        settings = (Setting(tuple(options.speeds), by_speed, options.sync_every, rounds, s) for s in options.seeds)
        outcomes = [train(setting) for setting in settings]
        losses = [outcome["loss"] for outcome in outcomes]
        rows.append(outcomes[0] | {"name": "by speed" if by_speed else "equally many", "losses": losses})
    columns: list[report.Column] = [
        ("local steps", lambda row: row["name"]),
        ("by worker", lambda row: " ".join(map(str, row["steps"]))),
        ("in all", lambda row: sum(row["steps"])),
        ("time", lambda row: f"{row['time']:.0f}"),
        ("computing", lambda row: f"{100 * row['computing']:.1f} %"),
        ("nats, mean (min to max)", lambda row: _spread(row["losses"])),
    ]
    report.show([], [report.table(rows, columns)], width=150)
    differences = [b - a for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True)]
    print("by speed - equally many, nats:", _spread(differences))


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.4f}" + (f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
