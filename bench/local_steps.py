"""The bytes of a round of local steps, on simulated ranks with the shipped algorithms.

    python -m bench.local_steps bytes [--ranks 8 20] [--elements 25600000]

The setting is SparseLoCo's (Sarfi et al., 2025): of each chunk of 4,096 elements 64 are selected, values have 2 bits.
SparseLoCo's format has 14 bits per entry, 12 for the index and 2 for the value, and every rank gets all entries. "In
pairs": a rank sends its entries to each of the P - 1 others. "By a store": it sends them once. The ranks' tensors are
independent, so few entries coincide, which costs most.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import sparsecomm as sc
from bench import report
from sparsecomm.transport import simulated

CHUNK, K = 4096, 64
THEIR_BITS = 12 + 2  # of an entry: an index within the chunk, and a value
ELEMENTS = 25_600_000  # as many as ResNet-50 has
RATES = {"100 Mb/s": 100e6, "1 Gb/s": 1e9}
ALPHA = 100e-6  # seconds per message
Row = dict[str, Any]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=["bytes"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 20], help="simulated ranks (8 20)")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"of the model ({ELEMENTS})")
    parser.add_argument("--wire", default="packed_int2", help="of sparse messages (packed_int2)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    args = parser.parse_args()
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


def entries(n: int) -> int:
    """Return the number of entries that a rank selects from n elements."""
    full, rest = divmod(n, CHUNK)
    return full * K + min(K, rest)


def theirs(P: int, n: int) -> list[Row]:
    """Return the bytes of SparseLoCo's format and of a dense ring."""
    mine = entries(n) * THEIR_BITS / 8
    ring = 2 * (P - 1) / P * 4 * n
    rows = [
        {"way": "dense, float32, a ring", "sent": ring, "received": ring},
        {"way": "SparseLoCo's format, in pairs", "sent": (P - 1) * mine, "received": (P - 1) * mine},
        {"way": "SparseLoCo's format, by a store", "sent": mine, "received": (P - 1) * mine},
    ]
    for row in rows:
        longer = max(row["sent"], row["received"])
        row |= {"ranks": P} | {name: 8 * longer / rate for name, rate in RATES.items()}
    return rows


def ours(P: int, n: int, algorithm: str, wire: str) -> Row:
    """Return the bytes and the virtual time of the library on simulated ranks, without computation."""
    options = {"algorithm": algorithm, "wire": wire, "chunk": CHUNK}
    costs = {name: cost_of_round(P, n, K, rate, options) for name, rate in RATES.items()}
    sent, received, _ = costs[next(iter(RATES))]
    row: Row = {"ranks": P, "way": f"{algorithm}, {wire}", "sent": sent, "received": received}
    return row | {"bits": 8 * sent / entries(n)} | {name: seconds for name, (_, _, seconds) in costs.items()}


def cost_of_round(P: int, n: int, k: int | float, rate: float, options: dict[str, Any]) -> tuple[int, int, float]:
    """Return the bytes that the busiest rank sends and receives in a call, and the virtual seconds of the call.

    It is the third call on its ranks, so bounds of earlier calls are known and links are measured. Each call has new
    random numbers. ``rate``: bits per second. ``options``: of `sparsecomm.sparse_allreduce`.
    """

    def program(transport: simulated.SimulatedTransport) -> tuple[int, int, float]:
        for call in range(3):
            counters, seconds = transport.counters, transport.seconds
            before = counters.bytes_sent, counters.bytes_received
            x = np.random.default_rng([call, transport.rank]).standard_normal(n, np.float32)
            sc.sparse_allreduce(x, k, comm=transport, out=x, **options)
        counters = transport.counters
        return counters.bytes_sent - before[0], counters.bytes_received - before[1], transport.seconds - seconds

    costs = [result.value or (0, 0, 0.0) for result in simulated.run(P, program, alpha=ALPHA, beta=8 / rate)]
    sent, received, _ = max(costs, key=lambda cost: cost[0] + cost[1])
    return sent, received, max(seconds for _, _, seconds in costs)


if __name__ == "__main__":
    main()
