"""Compare this machine's speed with recorded ratios: `make bench-check`.

    python -m bench.check             name every ratio that is above its bound; the exit status is then 1
    python -m bench.check --record    write bench/results/check.json
    python -m bench.check calls       only one group, or several; with --record, too

Each ratio is the cost of the library divided by the cost of a baseline in the same run. Costs are times, measured in
turns, or the instructions that callgrind counts. Counts repeat, so their bound is 2 % above the record. The bound of a
time is at least 15 % above its recorded median, and 5 % above its largest recorded value. A ratio above its bound is
measured again, up to twice, because only a slow library stays slow. Each group is recorded with its machine and
command, so you can record one group again without the others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import sparsecomm.torch as sct
from bench import figures, patches, report
from bench.instructions import NAMES, instructions
from bench.training import measure
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import kinds
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tools.outputs import json_text

ROOT = Path(__file__).parents[1]
FILE = ROOT / "bench/results/check.json"
RECORDED_TURNS, TURNS, ATTEMPTS = 5, 3, 3
N = 25_600_000
Ratios = dict[str, float]

# Two ranks make small calls over MPI, and dense allreduces.
MPI_RANKS = """
import json, time
import numpy as np
import sparsecomm as sc
from mpi4py import MPI

comm, n, k = MPI.COMM_WORLD, 65_536, 256
ratios = {}

def ratio(name, ours, theirs, rounds):
    times = np.empty((rounds, 2))
    for i in range(-rounds // 5, rounds):
        for j, action in enumerate((ours, theirs)):
            comm.Barrier()
            start = time.perf_counter()
            action()
            if i >= 0:
                times[i, j] = time.perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    a, b = np.median(times, axis=0)
    ratios[name] = a / b

x, out = np.random.default_rng(comm.rank).standard_normal(n, dtype=np.float32), np.empty(n, np.float32)
r, plain = np.zeros_like(x), np.zeros_like(x)
here = lambda: sc.sparse_allreduce(x, k, comm=comm)
dense = lambda: comm.Allreduce(x, out)
ratio("call, n = 65,536, k = 256 / MPI_Allreduce", here, dense, 2000)
ratio("with residual / MPI_Allreduce", lambda: sc.sparse_allreduce(x, k, comm=comm, residual=r), dense, 2000)
ratio("on the queue's thread / here", lambda: sc.isparse_allreduce(x, k, comm=comm).wait(), here, 1000)
ratio("top-k with residual / np.add", lambda: sc.topk(x, k, residual=r), lambda: np.add(plain, x, out=plain), 500)
if comm.rank == 0:
    print(json.dumps(ratios))
"""

# Ranks of a process group exchange entries, and all n elements densely.
PROCESS_GROUP = """
import json, time
import numpy as np, torch, torch.distributed as dist
import sparsecomm as sc

dist.init_process_group("gloo")
x = torch.from_numpy(np.random.default_rng(dist.get_rank()).standard_normal(65_536, dtype=np.float32))
times = np.empty((1000, 2))
for turn in times:
    for column, action in enumerate((lambda: sc.sparse_allreduce(x, 256), lambda: dist.all_reduce(x.clone()))):
        dist.barrier()
        start = time.perf_counter()
        action()
        turn[column] = time.perf_counter() - start
sparse, dense = np.median(times, axis=0)
if dist.get_rank() == 0:
    print(json.dumps(sparse / dense))
"""


def selection() -> Ratios:
    rows = figures.Figures()
    figures.selection(rows, [N])
    ratios = {f"{row['what']} / {row['against']}": row for row in rows.rows if row["theirs_ms"] is not None}
    return {name: row["ratio"] if row["sense"] == "<=" else 1 / row["ratio"] for name, row in ratios.items()}


def codecs() -> Ratios:
    """Pack and unpack entries in each kind of values, against copying the entries."""
    backend, ratios = CpuBackend(threads=1), {}
    entries = figures.random_entries(N // 64, N, 3)
    for kind in kinds.KINDS:
        exact = kind is kinds.EXACT
        values = entries.values if exact else backend.quantize_values(entries.values, kind)[0]
        rounded = SparseVector(entries.indices, values, N)

        def pack(kind: kinds.Kind = kind, rounded: SparseVector = rounded) -> None:
            backend.unpack(backend.pack(rounded, kind), b"", rounded.nnz, N, kind, False)

        ours, copy = figures.paired(pack, lambda: (entries.indices.copy(), entries.values.copy()), 21)
        ratios[f"pack and unpack {kind.name} / copy"] = float(np.median(ours / copy))
    return ratios


def weights() -> Ratios:
    """Make and apply patches of weights, against comparing and reading the weights."""
    options = Namespace(elements=N, changed=0.01, device="cpu", repeats=11)
    baselines = {"diff": patches.COMPARE, "apply": patches.READ, "apply, back": patches.READ}
    rows = {row["way"]: row for row in patches.speed(options)}
    return {f"patches: {way} / {baseline}": float(rows[way]["ratio"]) for way, baseline in baselines.items()}


def step() -> Ratios:
    """The own work of a step of SparseAdamW, against PyTorch's fused AdamW."""
    sparse, dense = (torch.nn.Parameter(torch.randn(N // 4)) for _ in range(2))
    sparse.grad = dense.grad = torch.randn(N // 4)
    optimizer = sct.SparseAdamW([("weights", sparse)], check_weights_every=None, comm=MPI.COMM_WORLD)
    fused = torch.optim.AdamW([dense], fused=True)
    seconds = measure({"ours": optimizer.step, "fused": fused.step}, steps=11, warmup=3)
    return {"step of SparseAdamW on one rank / fused AdamW": float(np.median(seconds["ours"] / seconds["fused"]))}


def calls() -> Ratios:
    """Small calls of two ranks, against dense allreduces of MPI and of a process group."""
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]

    def output(*command: str) -> Any:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return json.loads(done.stdout.splitlines()[-1])

    ratios: Ratios = output(mpirun, "-n", "2", sys.executable, "-c", MPI_RANKS)
    return ratios | {"call over a process group / all_reduce": output(*torchrun, sys.executable, "-c", PROCESS_GROUP)}


def counts() -> Ratios:
    """Instructions of small calls and steps, against those of a deep copy."""
    counted = instructions(ROOT, list(NAMES))
    copy = counted.pop("copy")
    return {f"instructions: {NAMES[name]} / deepcopy": count / copy for name, count in counted.items()}


GROUPS: dict[str, Callable[[], Ratios]] = {
    function.__name__: function for function in (selection, codecs, weights, step, calls, counts)
}


def measured(group: str, turns: int) -> dict[str, list[float]]:
    """Return the ratios of some turns by name. Counts need one turn."""
    results = [GROUPS[group]() for _ in range(1 if group == "counts" else turns)]
    return {name: [result[name] for result in results] for name in results[0]}


def bound(group: str, recorded: list[float]) -> float:
    """Return the largest ratio that is not slower than the recorded ones."""
    if group == "counts":
        return 1.02 * recorded[0]
    return max(1.15 * median(recorded), 1.05 * max(recorded))


def check(group: str, recorded: dict[str, list[float]]) -> int:
    """Print the ratios of a group, and return how many stay above their bounds."""
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for name, turns in measured(group, TURNS).items():
            best[name] = min(median(turns), best.get(name, float("inf")))
        slower = {name for name in recorded if best.get(name, 0) > bound(group, recorded[name])}
        if not slower:
            break
    for name, ratio in best.items():
        before = (
            f"recorded {median(recorded[name]):.3f}, bound {bound(group, recorded[name]):.3f}"
            if name in recorded
            else "new"
        )
        print(f"{'SLOWER' if name in slower else 'ok':7} {name}: {ratio:.3f} ({before})", flush=True)
    for name in recorded.keys() - best.keys():
        print(f"MISSING {name}: recorded, but not measured; record again if it was removed")
    return len(slower) + len(recorded.keys() - best.keys())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), metavar="GROUP", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--record", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "SPARSECOMM_THREADS": "1"}
    torch.set_num_threads(1)
    if unknown := set(options.groups) - GROUPS.keys():
        parser.error(f"unknown group {min(unknown)}: expected some of {', '.join(GROUPS)}")
    records = json.loads(FILE.read_text()) if FILE.exists() else {}
    if options.record:
        run = report.about("-m bench.check", sys.argv[1:] if arguments is None else list(arguments))
        records |= {group: {"run": run, "ratios": measured(group, RECORDED_TURNS)} for group in options.groups}
        FILE.write_text(json_text(records) + "\n")
        return 0
    if missing := [group for group in options.groups if group not in records]:
        parser.error(f"{FILE} has no ratios of {', '.join(missing)}; record them with --record {' '.join(missing)}")
    slower = 0
    for group in options.groups:
        print(f"# {group}, recorded:", *(line[2:] for line in report.head(records[group]["run"])), sep="\n#     ")
        slower += check(group, records[group]["ratios"])
    print(f"{slower} ratios are slower than recorded" if slower else "no ratio is slower than recorded")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
