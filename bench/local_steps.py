"""The cost of a round of local steps: bytes per rank, and seconds on a slow network.

    python -m bench.local_steps bytes [--ranks 8 20] [--elements 25600000]
    python -m bench.slow_network run --ranks 4 --rate 100mbit -- python -m bench.local_steps round

The setting is SparseLoCo's (Sarfi et al., 2025): of each chunk of 4,096 elements 64 are selected, values have 2 bits.

- ``bytes``: bytes that the busiest rank sends and receives in a round, on simulated ranks with the shipped algorithms,
  beside SparseLoCo's format: 14 bits per entry, 12 for the index and 2 for the value, and every rank gets all entries.
  "In pairs": a rank sends its entries to each of the P - 1 others. "By a store": it sends them once. The ranks' tensors
  are independent, so that few entries coincide, which costs most.
- ``round``: the time of a round's exchange: the dense mean of the pseudo-gradients by gloo's all_reduce, as DiLoCo has
  it, and `sparsecomm.Reducer`, selection, residuals and the dense result included.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

import sparsecomm as sc
from bench import report
from sparsecomm.transport import Transport, simulated

CHUNK, K = 4096, 64
THEIR_BITS = 12 + 2  # of an entry: an index within the chunk, and a value
ELEMENTS = 25_600_000  # as many as ResNet-50 has
RATES = {"100 Mb/s": 100e6, "1 Gb/s": 1e9}
ALPHA = 100e-6  # seconds per message
Row = dict[str, Any]
Vector = NDArray[np.float32]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=["bytes", "round"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 20], help="simulated ranks, with bytes (8 20)")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"of the model ({ELEMENTS})")
    parser.add_argument("--wire", default="packed_int2", help="of sparse messages (packed_int2)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, with round (5)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    args = parser.parse_args()
    {"bytes": count_bytes, "round": measure_round}[args.what](args)


def entries(n: int) -> int:
    """Return the number of entries that a rank selects from n elements."""
    full, rest = divmod(n, CHUNK)
    return full * K + min(K, rest)


# -- bytes ------------------------------------------------------------------------------------------------------------


def count_bytes(args: argparse.Namespace) -> None:
    rows = []
    for P in args.ranks:
        rows += theirs(P, args.elements)
        for algorithm in track(("allgather", "split", "split:2", "split:3"), description=f"P = {P}"):
            rows.append(ours(P, args.elements, algorithm, args.wire))
    of = {(row["ranks"], row["way"]): row["sent"] + row["received"] for row in rows}
    pairs, store = "SparseLoCo's format, in pairs", "SparseLoCo's format, by a store"
    columns = [
        ("P", lambda row: row["ranks"]),
        ("way", lambda row: row["way"]),
        ("sent, MB", report.number("sent", ".3f", 1e-6)),
        ("received, MB", report.number("received", ".3f", 1e-6)),
        ("bits sent per entry selected", lambda row: f"{row['bits']:.2f}" if "bits" in row else None),
        *(
            (
                f"SparseLoCo {name} / this",
                lambda row, way=way: f"{of[row['ranks'], way] / of[row['ranks'], row['way']]:.2f}",
            )
            for name, way in (("in pairs", pairs), ("by a store", store))
        ),
        *((f"s at {name}", report.number(name)) for name in RATES),
    ]
    title = f"a round's bytes, n = {args.elements / 1e6:g}M, {K} of each {CHUNK}, sent and received by the busiest rank"
    about = report.about("-m bench.local_steps", sys.argv[1:])
    report.publish(
        args.write, report.head(about), [report.table(rows, columns, title=title)], {"run": about, "rows": rows}
    )


def theirs(P: int, n: int) -> list[Row]:
    """Return the bytes of SparseLoCo's format and of a dense ring."""
    mine = entries(n) * THEIR_BITS / 8
    ring = 2 * (P - 1) / P * 4 * n
    found = [
        {"way": "dense, float32, a ring", "sent": ring, "received": ring},
        {"way": "SparseLoCo's format, in pairs", "sent": (P - 1) * mine, "received": (P - 1) * mine},
        {"way": "SparseLoCo's format, by a store", "sent": mine, "received": (P - 1) * mine},
    ]
    for row in found:
        longer = max(row["sent"], row["received"])
        row |= {"ranks": P} | {name: 8 * longer / rate for name, rate in RATES.items()}
    return found


def ours(P: int, n: int, algorithm: str, wire: str) -> Row:
    """Return the bytes and the virtual time of the library on simulated ranks, without computation."""

    def program(transport: Transport) -> None:
        x = np.random.default_rng(transport.rank).standard_normal(n, np.float32)
        sc.sparse_allreduce(x, K, chunk=CHUNK, comm=transport, algorithm=algorithm, wire=wire)

    row: Row = {"ranks": P, "way": f"{algorithm}, {wire}"}
    for name, rate in RATES.items():
        results = simulated.run(P, program, alpha=ALPHA, beta=8 / rate)
        row[name] = max(result.seconds for result in results)
    busiest = max(results, key=lambda result: result.counters.bytes_sent + result.counters.bytes_received)
    row |= {"sent": busiest.counters.bytes_sent, "received": busiest.counters.bytes_received}
    return row | {"bits": 8 * row["sent"] / entries(n)}


# -- the time of a round ----------------------------------------------------------------------------------------------


def measure_round(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from bench.training import measure, publish, quartiles_text, start_gloo

    world, n = MPI.COMM_WORLD, args.elements
    start_gloo()
    torch.set_num_threads(1)
    x = np.random.default_rng(world.rank).standard_normal(n, np.float32)
    dense, sparse = torch.from_numpy(x.copy()), np.empty_like(x)
    options: dict[str, Any] = {"wire": args.wire, "scope": "chunk", "chunk": CHUNK, "decay": 0.95}
    reducers = {
        algorithm: sc.Reducer({"x": x}, K / CHUNK, comm=world, algorithm=algorithm, **options)
        for algorithm in ("split", "split:2", "allgather")
    }

    def gloo() -> None:
        dist.all_reduce(dense)
        dense.div_(world.size)

    def exchange(reducer: sc.Reducer) -> None:
        reducer.push("x", x, sparse)
        reducer.wait()

    contenders = {"gloo, dense": gloo} | {name: partial(exchange, reducer) for name, reducer in reducers.items()}
    slowest = measure(contenders, args.rounds)
    dist.destroy_process_group()
    if world.rank > 0:
        return
    ms = {name: report.quartiles(seconds, 1e3) for name, seconds in slowest.items()}
    sent = {name: r.counters.bytes_sent / r.counters.steps for name, r in reducers.items()}
    columns = [
        ("exchange of a round", lambda name: name),
        ("ms (quartiles)", lambda name: quartiles_text(ms[name])),
        ("dense / this", lambda name: f"{ms['gloo, dense'][1] / ms[name][1]:.1f}"),
        ("MB sent by rank 0", lambda name: f"{sent[name] / 1e6:.3f}" if name in sent else None),
    ]
    title = f"exchange of pseudo-gradients of {n / 1e6:g}M weights, {K} of each {CHUNK}, {args.wire}, P = {world.size}"
    table = report.table(ms, columns, title=title)
    publish(args, "round", table, {"n": n, "ms": ms, "sent": sent}, "-m bench.local_steps")


if __name__ == "__main__":
    main()
