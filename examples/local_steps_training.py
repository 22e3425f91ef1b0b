"""Does training with local steps and sparse pseudo-gradients reach what dense ones reach?

    python examples/local_steps_training.py                                  # the table of P = 8, H = 30
    python examples/local_steps_training.py sync_every=1,10,100 method=dense,allgather,split bits=2
    python examples/local_steps_training.py --report bench/results/local-steps.jsonl --out bench/results/local-steps

P workers train the LSTM on English text of `convergence_tasks.py`, each on its own share of the data, by AdamW
(`local_steps_worker.py`); after H local steps `sparsecomm.LocalSteps` exchanges their pseudo-gradients, on simulated
ranks in one process. Every combination of the given values is trained; each training is a line of OUT.jsonl, and those
that it has already are not repeated. OUT.txt has the tables, OUT.png the plot. Bytes and seconds are those of a model
of 25.6 million weights with the same settings (`local_steps_costs.py`); computation is not in them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if missing := [n for n in ("torch", "matplotlib", "rich", "greenlet") if importlib.util.find_spec(n) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install 'sparsecomm[demo,torch,simulated]'")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

from grid import Grid
from local_steps_worker import STEPS, Worker

import sparsecomm as sc
from sparsecomm.transport import Transport, simulated

__all__ = ["GRID", "Setting", "train"]

CHUNK = 4096
WIRES = {32: "packed", 8: "packed_int8", 4: "packed_int4", 2: "packed_int2", 1: "packed_sign"}
POINTS = 20  # of a curve, at most


@dataclass(frozen=True)
class Setting:
    """The parameters of a training.

    Attributes:
        ranks: P, workers.
        sync_every: H, local steps of a round.
        method: the algorithm of `sparsecomm.sparse_allreduce`: "dense", "allgather", "split", "split:2", ...
        bits: of a value on the wire. Dense ones have 32.
        k: entries that a worker selects of each chunk of 4,096.
        op, decay: as in `sparsecomm.LocalSteps`.
        delay: its `fragment_sync_delay`.
        outer, momentum: of the outer optimizer, SGD with Nesterov's momentum; 1 and 0 for none.
        steps: local steps of each worker.
        seed: of weights and batches.
        alpha: the `fragment_update_alpha` of `sparsecomm.LocalSteps`.
    """

    ranks: int = 8
    sync_every: int = 30
    method: str = "split"
    bits: int = 2
    k: int = 64
    op: str = "mean"
    decay: float = 0.95
    delay: int = 0
    outer: float = 1.0
    momentum: float = 0.0
    steps: int = STEPS
    seed: int = 0
    alpha: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `sparsecomm.sparse_allreduce` that tell how a round is exchanged."""
        if self.method == "dense":
            return {"algorithm": "dense"}
        return {"algorithm": self.method, "wire": WIRES[self.bits], "op": self.op, "chunk": CHUNK}


def train(setting: Setting) -> dict[str, Any]:
    """Return the outcome of a training, with all workers in this process."""
    results = simulated.run(setting.ranks, lambda transport: work(setting, transport))
    outcomes = [result.value for result in results]
    if any(outcome != outcomes[0] for outcome in outcomes if outcome and "curve" not in outcome):
        raise RuntimeError(f"{setting}: at the end the global parameters differ between workers")
    assert outcomes[0] is not None
    return outcomes[0]


def work(setting: Setting, transport: Transport) -> dict[str, Any]:
    """Do one worker's part of a training. Of rank 0 only the losses are returned."""
    worker = Worker(transport.rank, transport.size, setting.seed, setting.steps)
    plain = setting.outer == 1 and setting.momentum == 0
    dense = setting.method == "dense"
    local = sc.LocalSteps(
        worker.parameters,
        1.0 if dense else setting.k / CHUNK,
        sync_every=setting.sync_every,
        fragment_sync_delay=setting.delay,
        outer=None if plain else sc.NesterovSGD(setting.outer, setting.momentum),
        comm=transport,
        decay=1.0 if dense else setting.decay,
        fragment_update_alpha=setting.alpha,
        **setting.options,
    )
    rounds = setting.steps // setting.sync_every
    curve = []
    for round_no in range(1, rounds + 1):
        for _ in range(setting.sync_every):
            worker.step()
            local.step(worker.parameters)
        if transport.rank == 0 and (round_no * POINTS // rounds > (round_no - 1) * POINTS // rounds or round_no == 1):
            curve.append((round_no, round(worker.loss(some=True), 4)))
    local.finish(worker.parameters)
    return {"curve": curve, "loss": worker.loss(some=False)} if transport.rank == 0 else {}


# -- the command line -------------------------------------------------------------------------------------------------


GRID = Grid(Setting, "setting")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with local steps, with dense and sparse pseudo-gradients.")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE,...", help="see Setting")
    parser.add_argument("--out", type=Path, default=Path("local-steps"), help="what to write, without .jsonl")
    parser.add_argument("--report", type=Path, help="train nothing: tables and plot of this file")
    given = parser.parse_args()
    results = given.report or given.out.with_suffix(".jsonl")
    if not given.report:
        done = GRID.read(results)
        for setting in GRID.combinations(given.settings):
            if setting in done:
                continue
            outcome = train(setting)
            GRID.append(results, setting, outcome)
            print(f"{outcome['loss']:.4f}", setting, flush=True)
    else:
        from local_steps_tables import write

        write(GRID.read(results), given.out)


if __name__ == "__main__":
    main()
