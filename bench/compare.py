"""Every algorithm of sparsecomm beside every baseline, on the same inputs, in one run.

    mpirun -n 8 python bench/compare.py                                     25.6M elements, density 0.001
    mpirun -n 8 python bench/compare.py --n 4e6 --densities 0.001,0.01,0.1  from which density on dense wins

What is timed and how, and how results are checked: docs/comparison.md. ``--write FOLDER`` puts the tables and a JSON
file there, with the machine, the versions and the command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import sparsecomm as sc  # noqa: E402
from bench.baselines import BASELINES, Baseline  # noqa: E402
from sparsecomm import config, transport  # noqa: E402
from sparsecomm.algorithms import ALGORITHMS, Group, Link, Problem  # noqa: E402
from sparsecomm.dtypes import FLOAT32  # noqa: E402
from sparsecomm.ops import CpuOps, _cpu  # noqa: E402
from sparsecomm.wire import OPS, WIRES, Call, Messages  # noqa: E402
from tests import reference  # noqa: E402

Entries = tuple[np.ndarray, np.ndarray]
COMM = MPI.COMM_WORLD
SPARSE = [name for name in ALGORITHMS if name != "dense"]
ARRAYS = 10  # of n float32, at most, that a rank has at once: torch.topk takes four for itself
DENSE = ["dense", "dense-ring", "dense-mpi"]
ORACLE = 4_000_000  # entries of all ranks together up to which the oracle, which is slow, merges them
SAMPLE = 97  # dense results are compared at every 97th place


# -- what is compared --------------------------------------------------------------------------------------------------


class Inputs:
    """A gradient per rank, a residual and an output, which all contenders share."""

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        self.n, self.k = n, k
        self.x = np.random.default_rng([seed, COMM.rank]).standard_normal(n, dtype=np.float32)
        self.r, self.out = np.zeros_like(self.x), np.zeros_like(self.x)


class Contender:
    """Something that sums gradients. ``before`` sets up what ``step`` or ``exchange`` starts from, and is not timed."""

    name: str
    sparse: bool
    slow = False
    whole = False  # a step is nothing but the exchange: timed once

    def before(self, kind: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """From gradient and residual to the dense sum, in ``out``."""
        raise NotImplementedError

    def exchange(self) -> None:
        """From what each rank has selected to the sum."""
        raise NotImplementedError

    def sent(self) -> float:
        """Bytes that this rank has sent so far."""
        raise NotImplementedError

    def parts(self) -> dict[str, float]:
        """Seconds that the last exchange spent in its arithmetic, by what it did."""
        return {}

    def check(self) -> str | None:
        """What is wrong with the result of a step, on this rank. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class TimedOps:
    """Ops that say for how long they ran."""

    def __init__(self) -> None:
        self._ops = CpuOps()
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._ops, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        self.__dict__[name] = timed  # asked for once
        return timed


class Given:
    """In place of `sparsecomm.feedback.Gradient`: entries that were selected before, and no residual."""

    def __init__(self, entries: sc.SparseVector | None, whole: np.ndarray, shape: tuple[int, ...]) -> None:
        self.entries, self._whole, self.shape = entries, whole, shape

    def topk(self, k: int) -> sc.SparseVector | None:
        return self.entries

    def whole(self) -> np.ndarray:
        return self._whole

    def put_back(self, entries: sc.SparseVector) -> None:
        pass


class Ours(Contender):
    def __init__(self, name: str, inputs: Inputs, wire: str) -> None:
        self.name, self.sparse, self.inputs, self.wire = name, name != "dense", inputs, wire
        self.ranks = transport.of(COMM)
        self.ops = TimedOps()
        self.selected = sc.topk(inputs.x, inputs.k) if self.sparse else None

    def before(self, kind: str) -> None:
        if kind == "step":
            self.inputs.r.fill(0)
        elif not self.sparse:
            np.copyto(self.inputs.out, self.inputs.x)  # summed in place
        self.ops.seconds.clear()

    def step(self) -> None:
        i = self.inputs
        sc.sparse_allreduce(i.x, i.k, comm=COMM, algorithm=self.name, residual=i.r, out=i.out, wire=self.wire)

    def exchange(self) -> None:
        i = self.inputs
        format_ = WIRES["plain" if self.wire == "auto" else self.wire]
        call = Call(self.name, FLOAT32.code, OPS.index("sum"), format_.code, i.n, i.k)
        messages = Messages(call, format_, self.ranks.rank, FLOAT32.carrier, i.x.shape)
        group = Group(self.ranks, self.ops, messages)
        ALGORITHMS[self.name].run(group, Given(self.selected, i.out, i.x.shape), i.k)
        group.end()

    def sent(self) -> float:
        return self.ranks.counters.bytes_sent

    def parts(self) -> dict[str, float]:
        return dict(self.ops.seconds)

    def check(self) -> str | None:
        i = self.inputs
        self.before("step")
        self.step()
        if not self.sparse:
            return wrong_sum(i, 4 * COMM.size * np.finfo(np.float32).eps)
        mine = self.selected.indices, self.selected.values
        oracle = getattr(reference, self.name)
        return (
            wrong_selection(i, mine)
            or wrong_entries(i, mine, lambda every: oracle(every, i.k) if self.name != "allgather" else oracle(every))
            or self._lost()
        )

    def _lost(self) -> str | None:
        """Nothing may be lost: residuals and result make up what there was, at every sampled place."""
        i = self.inputs
        kept = np.sum(gathered(i.r[::SAMPLE]), axis=0, dtype=np.float64) + i.out[::SAMPLE]
        return _differs(kept, np.array(gathered(i.x[::SAMPLE]), np.float64), 4 * COMM.size * np.finfo(np.float32).eps)


class Theirs(Contender):
    def __init__(self, kind: type[Baseline], inputs: Inputs) -> None:
        self.baseline, self.inputs = kind(COMM), inputs
        self.name, self.sparse, self.slow, self.whole = kind.name, kind.sparse, kind.slow, kind.whole
        self.selected = None if self.whole else self._select()

    def _select(self) -> Any:
        self.inputs.r.fill(0)
        return self.baseline.select(self.inputs.x, self.inputs.r, self.inputs.k)

    def before(self, kind: str) -> None:
        if kind == "step":
            self.inputs.r.fill(0)

    def step(self) -> None:
        self.baseline.step(self.inputs.x, self.inputs.r, self.inputs.k, self.inputs.out)

    def exchange(self) -> None:
        self.baseline.exchange(self.selected)

    def sent(self) -> float:
        return self.baseline.sent

    def check(self) -> str | None:
        i, eps = self.inputs, 4 * COMM.size * np.finfo(np.float32).eps
        self.before("step")
        self.step()
        if self.name == "int8":
            largest = COMM.allreduce(np.abs(i.x).max(), MPI.SUM) / 254
            return wrong_sum(i, eps, largest + (np.abs(i.out).max() + largest) / 250)
        if not self.sparse:
            return wrong_sum(i, eps)
        if self.name != "gtopk-paper":
            return wrong_selection(i, self.selected) or wrong_entries(i, self.selected, reference.allgather, eps)
        doubles = self.selected[0], self.selected[1].astype(np.float64)
        return wrong_selection(i, self.selected) or wrong_entries(i, doubles, lambda v: reference.tree(v, i.k), eps)

    def close(self) -> None:
        self.baseline.close()


# -- whether results are right -----------------------------------------------------------------------------------------


def gathered(values: np.ndarray) -> np.ndarray:
    """The values of every rank, in rows."""
    rows = np.empty((COMM.size, len(values)), values.dtype)
    COMM.Allgather(np.ascontiguousarray(values), rows)
    return rows


def _differs(found: np.ndarray, addends: np.ndarray, relative: float, absolute: float = 0) -> str | None:
    """``found`` should be the sum of the rows of ``addends``."""
    bound = relative * np.abs(addends).sum(axis=0) + absolute
    wrong = ~(np.abs(found - addends.sum(axis=0)) <= bound)
    if not wrong.any():
        return None
    first = int(np.flatnonzero(wrong)[0])
    return f"{wrong.sum()} of {len(wrong)} sampled sums, the first {found[first]!r}, not {addends[:, first].sum()!r}"


def wrong_sum(i: Inputs, relative: float, absolute: float = 0) -> str | None:
    """Whether ``out`` is not the dense sum (at sampled places), or not the same on all ranks."""
    sums = COMM.allgather(zlib.crc32(i.out))
    said = _differs(i.out[::SAMPLE], np.array(gathered(i.x[::SAMPLE]), np.float64), relative, absolute)
    return said or (None if len(set(sums)) == 1 else f"the ranks differ: {sums}")


def wrong_selection(i: Inputs, mine: Entries) -> str | None:
    """Whether these are not k entries of x, none of which is smaller than one left out. Any of equal ones will do."""
    indices, values = mine
    if len(indices) != i.k or len(np.unique(indices)) != i.k or not np.array_equal(i.x[indices], values):
        return f"{len(indices)} entries selected that are not {i.k} entries of x"
    larger, least = 0, np.abs(values).min()
    for part in np.array_split(i.x, max(1, i.n >> 20)):
        larger += np.count_nonzero(np.abs(part) > least)
    chosen = np.count_nonzero(np.abs(values) > least)
    return (
        None if larger == chosen else f"{larger} entries are larger than the least selected, and {chosen} of these are"
    )


def wrong_entries(
    i: Inputs, mine: Entries, oracle: Callable[[list[Entries]], Entries], relative: float = 0.0
) -> str | None:
    """Whether ``out`` differs between ranks, or is not what the oracle makes of all ranks' selections.

    To the bit if ``relative`` is 0. Beyond `ORACLE` entries only the former.
    """
    if len(set(sums := COMM.allgather(zlib.crc32(i.out)))) != 1:
        return f"the ranks differ: {sums}"
    if len(mine[0]) * COMM.size > ORACLE:
        return None
    order = np.argsort(mine[0])
    every = COMM.gather((mine[0][order], mine[1][order]))
    indices, values = COMM.bcast(oracle(every) if every is not None else None)
    if (count := np.count_nonzero(i.out)) != len(indices):
        return f"{count} entries instead of {len(indices)}"
    bound = relative * np.abs(values) + (relative and 1e-6)  # sums of several ranks may all but cancel
    wrong = ~(np.abs(i.out[indices] - values) <= bound)
    return f"{wrong.sum()} of {len(indices)} entries" if wrong.any() else None


# -- timing ------------------------------------------------------------------------------------------------------------


def quiet_barrier() -> None:
    """All ranks together, without those that wait taking the cores of those that work."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(100e-6)
    COMM.Barrier()  # by now all are here: aligns them


def on_the_wire() -> int:
    """Bytes that this host has sent over networks."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counts.items() if name != "lo")


class Drain:
    """Uses up the bursts that a link limited by a token bucket lets pass at full speed after a pause."""

    def __init__(self, nbytes: int) -> None:
        self._out, self._into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def __call__(self) -> None:
        """All ranks to their neighbours at once; then at once together."""
        if len(self._out) and COMM.size > 1:
            COMM.Sendrecv(
                self._out, (COMM.rank + 1) % COMM.size, recvbuf=self._into, source=(COMM.rank - 1) % COMM.size
            )
            COMM.Barrier()


class Times:
    """What was measured of each contender, by kind, round by round: NaN in rounds in which it did not run."""

    def __init__(self, rounds: int, drain: Drain) -> None:
        self.rounds, self.drain = rounds, drain
        self.seconds: dict[tuple[str, str], np.ndarray] = {}
        self.sent: dict[tuple[str, str], float] = {}
        self.wire: dict[tuple[str, str], float] = {}
        self.parts: dict[tuple[str, str], np.ndarray] = {}  # (contender, what) -> seconds

    def run(self, c: Contender, kind: str, round: int) -> float:
        """Once; rounds below 0 warm up. Seconds on this rank."""
        c.before(kind)
        quiet_barrier()
        self.drain()
        key, sent, wire = (c.name, kind), c.sent(), on_the_wire()
        start = time.perf_counter()
        c.step() if kind == "step" else c.exchange()
        took = time.perf_counter() - start
        quiet_barrier()  # what was sent has now left, and the barrier's own bytes are few
        if round >= 0:
            self._row(self.seconds, key)[round] = took
            self.sent[key], self.wire[key] = c.sent() - sent, on_the_wire() - wire
            if kind == "exchange":
                for part, seconds in c.parts().items():
                    self._row(self.parts, (c.name, part))[round] = seconds
        return took

    def share(self) -> None:
        """Maxima over ranks. A rank may lack a part that others have: the leaves of the tree merge nothing."""
        for rows in (self.seconds, self.parts):
            for key in sorted({key for keys in COMM.allgather(list(rows)) for key in keys}):
                mine = rows.setdefault(key, np.full(self.rounds, np.nan))
                COMM.Allreduce(MPI.IN_PLACE, ranked := np.nan_to_num(mine, nan=-1.0), MPI.MAX)
                rows[key] = np.where(ranked < 0, np.nan, ranked)
        self.most = {key: COMM.allreduce(value, MPI.MAX) for key, value in self.sent.items()}
        self.mean = {key: COMM.allreduce(value, MPI.SUM) / COMM.size for key, value in self.sent.items()}
        alone = len(set(COMM.allgather(socket.gethostname()))) == COMM.size > 1  # else hosts count others' bytes too
        self.wire = {key: COMM.allreduce(value, MPI.MAX) if alone else math.nan for key, value in self.wire.items()}

    def median(self, name: str, kind: str) -> float:
        return float(np.nanmedian(self.seconds[name, kind]))

    def _row(self, rows: dict[tuple[str, str], np.ndarray], key: tuple[str, str]) -> np.ndarray:
        return rows.setdefault(key, np.full(self.rounds, np.nan))


def measure(contenders: list[Contender], options: argparse.Namespace, say: Callable[[str], None]) -> Times:
    """All in turn, round by round, so that a change of the machine's speed meets all alike."""
    rounds, times = options.rounds, Times(options.rounds, Drain(options.drain))
    slow = {rounds * i // options.slow_rounds for i in range(options.slow_rounds)}
    for round in range(-1, rounds):
        say(f"round {round + 1} of {rounds}" if round >= 0 else "warm-up")
        for c in contenders:
            if round < 0 or not c.slow or round in slow:
                for kind in ("step",) if c.whole else ("step", "exchange"):
                    times.run(c, kind, round)
    times.share()
    for c in contenders:
        if c.whole:
            for rows in (times.seconds, times.most, times.mean, times.wire):
                rows[c.name, "exchange"] = rows[c.name, "step"]
    return times


def measured_link(trips: int = 200) -> Link:
    """alpha: half a round trip of 8 bytes; beta: seconds per further byte of long messages. Medians over pairs."""
    P = COMM.size
    if P == 1:
        return Link(0.0, 0.0)
    messages = {size: np.zeros(size, np.uint8) for size in (8, 1 << 20, 1 << 22, 1 << 24)}
    found = []
    for a, b in sorted({(0, 1), (0, P - 1), (P // 2 - 1, P // 2)}):
        alpha = half_trip(messages[8], a, b, trips)
        fast = COMM.bcast(half_trip(messages[1 << 22], a, b, 1), a) < 0.1
        sizes = (1 << 22, 1 << 24) if fast else (1 << 20, 1 << 22)
        times = [half_trip(messages[size], a, b, 5 if fast else 3) for size in sizes]
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        quiet_barrier()
        found.append(COMM.bcast((alpha, slope), a))
    alpha, beta = np.median(found, axis=0)
    return Link(float(alpha), float(beta))


def message_time(nbytes: int) -> float:
    """Seconds in which one message of so many bytes goes from rank to rank, with nothing else under way."""
    return float(COMM.bcast(half_trip(np.zeros(nbytes, np.uint8), 0, COMM.size - 1, 7) if COMM.size > 1 else 0.0))


def half_trip(message: np.ndarray, a: int, b: int, trips: int) -> float:
    took = []
    quiet_barrier()
    for _ in range(trips + trips // 10 + 1):
        start = time.perf_counter()
        if COMM.rank == a:
            COMM.Send(message, b)
            COMM.Recv(message, b)
        elif COMM.rank == b:
            COMM.Recv(message, a)
            COMM.Send(message, a)
        took.append((time.perf_counter() - start) / 2)
    quiet_barrier()
    return float(np.median(took[-trips:]))


def given_link() -> Link | None:
    """The link that a slow network says it has, from the JSON file named by SLOW_NETWORK_LINK."""
    path = os.environ.get("SLOW_NETWORK_LINK")
    if not path:
        return None
    try:
        said = json.loads(Path(path).read_text())
        return Link(float(said["alpha"]), float(said["beta"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"SLOW_NETWORK_LINK={path}: {error!r}; expected a JSON file with alpha and beta") from error


# -- tables ------------------------------------------------------------------------------------------------------------


def quartiles(times: np.ndarray, scale: float = 1.0) -> list[float]:
    return [float(q) for q in np.nanpercentile(times * scale, [25, 50, 75])]


def timing_rows(contenders: list[Contender], times: Times) -> list[dict[str, Any]]:
    rows = []
    for c in contenders:
        row: dict[str, Any] = {"name": c.name, "ours": isinstance(c, Ours)}
        for kind in ("step", "exchange"):
            q1, median, q3 = quartiles(times.seconds[c.name, kind], 1e3)
            row[f"{kind}_ms"], row[f"{kind}_quartiles_ms"] = median, [q1, q3]
            row["rounds"] = int(np.isfinite(times.seconds[c.name, kind]).sum())
        key = c.name, "exchange"
        row |= {"sent": times.most[key], "sent_mean": times.mean[key], "wire": times.wire[key]}
        row["parts_ms"] = {
            part: float(np.nanmedian(seconds)) * 1e3 for (name, part), seconds in times.parts.items() if name == c.name
        }
        rows.append(row)
    return rows


def timing_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "", "whole step, ms", "quartiles", "exchange, ms", "quartiles", "of it sums and merges, ms", "bytes sent: max",
        "mean", "on the wire", "rounds", title="times, the maximum over ranks",
    )  # fmt: skip
    for r in rows:
        merging = sum(ms for part, ms in r["parts_ms"].items() if part in ("merge", "merge_topk", "add"))
        cells = []
        for kind in ("step", "exchange"):
            q1, q3 = r[f"{kind}_quartiles_ms"]
            cells += [f"{r[f'{kind}_ms']:.3f}", f"{q1:.3f} - {q3:.3f}"]
        cells.append(f"{merging:.3f}" if r["parts_ms"] else "")
        cells += ["" if math.isnan(r[b]) else f"{r[b]:,.0f}" for b in ("sent", "sent_mean", "wire")]
        table.add_row(("ours: " if r["ours"] else "") + r["name"], *cells, str(r["rounds"]))
    return table


def bound_rows(names: list[str], times: Times, problem: Problem, links: dict[str, Link]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "exchange_ms": times.median(name, "exchange") * 1e3}
        for source, link in links.items():
            bound = ALGORITHMS[name].seconds(problem, link)
            row[source] = {"bound_ms": bound * 1e3, "ratio": times.median(name, "exchange") / bound if bound else None}
        ratio = row["measured"]["ratio"]
        row |= {"target": 1.3, "met": None if ratio is None else ratio <= 1.3}
        rows.append(row)
    return rows


def bound_table(rows: list[dict[str, Any]], links: dict[str, Link]) -> Table:
    table = Table("", "exchange, ms", title="exchange against alpha and beta", caption=link_text(links))
    for source in links:
        table.add_column(f"bound, ms ({source})")
        table.add_column("ratio")
    table.add_column("target")
    table.add_column("met")
    for r in rows:
        cells = []
        for source in links:
            ratio = r[source]["ratio"]
            cells += [f"{r[source]['bound_ms']:.3f}", "" if ratio is None else f"{ratio:.2f}"]
        met = "" if r["met"] is None else "yes" if r["met"] else "no"
        table.add_row(f"ours: {r['name']}", f"{r['exchange_ms']:.3f}", *cells, f"<= {r['target']}", met)
    return table


def link_text(links: dict[str, Link]) -> str:
    return "; ".join(
        f"{s}: alpha = {v.alpha * 1e6:.1f} us, beta = {v.beta * 1e9:.3f} ns/byte" for s, v in links.items()
    )


def message_lines(results: dict[str, Any]) -> list[str]:
    """A link that lets bursts pass makes short messages cheaper than its alpha and beta say: seen here."""
    if "message" not in results:
        return []
    link, nbytes, ms = results["links"]["measured"], results["message"]["bytes"], results["message"]["ms"]
    says = (link["alpha"] + nbytes * link["beta"]) * 1e3
    return [
        f"# one message of k entries, {nbytes:,} bytes: {ms:.3f} ms; alpha and beta say {says:.3f}",
        f"# before each timing all send {results['drain']:,} bytes, to use up bursts",
    ]


def launched_ring() -> bool:
    """Whether Open MPI was told to take its ring for allreduce."""
    said = {
        name: os.environ.get(f"OMPI_MCA_coll_tuned_{name}") for name in ("use_dynamic_rules", "allreduce_algorithm")
    }
    return said == {"use_dynamic_rules": "1", "allreduce_algorithm": "4"}


def fastest(times: Times, names: list[str], kind: str) -> str | None:
    return min((n for n in names if (n, kind) in times.seconds), key=lambda n: times.median(n, kind), default=None)


def rings() -> list[str]:
    return ["dense-ring", "dense", *(["dense-mpi"] if launched_ring() else [])]


def ratio_rows(times: Times) -> list[dict[str, Any]]:
    """How much faster ours is. Dense ring and ours: the fastest that ran, of each."""
    rows = []
    for kind, what, of, target in (
        ("exchange", "dense ring", rings(), 120),
        ("step", "dense ring", rings(), 40),
        ("step", "gTop-k the paper's way", ["gtopk-paper"], 10),
        ("step", "Top-k by allgather in NumPy", ["topk-numpy"], 10),
        ("exchange", "our allgather", ["allgather"], 2),
        ("exchange", "dense by MPI", ["dense-mpi"], None),
        ("step", "dense by MPI", ["dense-mpi"], None),
        ("exchange", "dense in 8 bits", ["int8"], None),
        ("step", "dense in 8 bits", ["int8"], None),
        ("exchange", "gTop-k the paper's way", ["gtopk-paper"], None),
        ("exchange", "Top-k by allgather in NumPy", ["topk-numpy"], None),
        ("exchange", "torch.topk, all_gather over gloo", ["topk-gloo"], None),
        ("step", "torch.topk, all_gather over gloo", ["topk-gloo"], None),
    ):
        slow, ours = fastest(times, of, kind), fastest(times, SPARSE, kind)
        if slow is None or ours is None:
            continue
        q1, median, q3 = quartiles(times.seconds[slow, kind] / times.seconds[ours, kind])
        rows.append(
            {
                "what": f"{'whole step' if kind == 'step' else 'exchange alone'}: {what} / ours",
                "theirs": slow,
                "theirs_ms": times.median(slow, kind) * 1e3,
                "ours": ours,
                "ours_ms": times.median(ours, kind) * 1e3,
                "ratio": median,
                "quartiles": [q1, q3],
                "target": target,
                "met": None if target is None else median >= target,
            }
        )
    return rows


def ratio_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "", "theirs", "ms", "ours", "ms", "ratio", "quartiles", "target", "met", title="ratios, round by round"
    )
    for r in rows:
        q1, q3 = r["quartiles"]
        target = "" if r["target"] is None else f">= {r['target']}"
        met = "" if r["met"] is None else "yes" if r["met"] else "no"
        table.add_row(
            r["what"], r["theirs"], f"{r['theirs_ms']:.3f}", r["ours"], f"{r['ours_ms']:.3f}", f"{r['ratio']:.2f}",
            f"{q1:.2f} - {q3:.2f}", target, met,
        )  # fmt: skip
    return table


def density_row(density: float, times: Times) -> dict[str, Any]:
    row: dict[str, Any] = {"density": density}
    for kind in ("step", "exchange"):
        ours, dense = fastest(times, SPARSE, kind), fastest(times, DENSE, kind)
        a, b = times.seconds[ours, kind], times.seconds[dense, kind]
        row[kind] = {
            "ours": ours,
            "ours_ms": float(np.median(a)) * 1e3,
            "dense": dense,
            "dense_ms": float(np.median(b)) * 1e3,
            "ratio": float(np.median(b / a)),
            "winner": "ours" if np.median(b / a) > 1 else "dense",
        }
    return row


def density_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("density", title="sparse against dense: the fastest of each", caption=crossings(rows))
    for kind in ("whole step", "exchange alone"):
        for column in (f"{kind}: ours, ms", "dense, ms", "ratio", "winner"):
            table.add_column(column)
    for r in rows:
        cells = []
        for kind in ("step", "exchange"):
            c = r[kind]
            cells += [f"{c['ours']} {c['ours_ms']:.3f}", f"{c['dense']} {c['dense_ms']:.3f}", f"{c['ratio']:.2f}"]
            cells.append(c["winner"])
        table.add_row(f"{r['density']:g}", *cells)
    return table


def crossings(rows: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{'whole step' if kind == 'step' else 'exchange alone'}: {text(crossing(rows, kind), rows, kind)}"
        for kind in ("step", "exchange")
    )


def text(density: float | None, rows: list[dict[str, Any]], kind: str) -> str:
    if density is None:
        return f"{rows[0][kind]['winner']} wins at all these densities"
    return f"dense wins above a density of {density:.2g}"


def crossing(rows: list[dict[str, Any]], kind: str) -> float | None:
    """The density from which on dense wins, between two that were measured: linear in the logarithms."""
    for lower, upper in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        a, b = (math.log(r[kind]["ratio"]) for r in (lower, upper))
        if a > 0 >= b:
            return float(math.exp(np.interp(0, [b, a], [math.log(upper["density"]), math.log(lower["density"])])))
    return None


# -- the run -----------------------------------------------------------------------------------------------------------


def header() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = {name: _version(name) for name in ("sparsecomm", "numpy", "mpi4py", "torch")}
    names = (
        "OMPI_MCA_coll_tuned_",
        "OMPI_MCA_btl",
        "OMPI_MCA_pml",
        "OMPI_MCA_mpi_yield",
        "SPARSECOMM_",
        "GLOO_",
        "SLOW_NETWORK",
    )
    return {
        "command": f"mpirun -n {COMM.size} python bench/compare.py {' '.join(sys.argv[1:])}",
        "machine": f"{cpu}, {os.cpu_count()} cores, {_cpu.simd()}; {config.threads()} thread(s) per rank",
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "versions": versions | {"python": platform.python_version()},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(names)},
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except Exception:
        return None


def contenders(inputs: Inputs, options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Contender]:
    for name in ALGORITHMS:
        if name in options.only:
            yield Ours(name, inputs, options.wire)
    for name, kind in BASELINES.items():
        if name in options.only:
            try:
                yield Theirs(kind, inputs)
            except ValueError as error:  # on every rank
                say(f"left out: {error}")


def checked(found: list[Contender], say: Callable[[str], None]) -> list[str]:
    """What is wrong, on any rank."""
    wrong = []
    for c in found:
        said = [f"{c.name}, rank {rank}: {text}" for rank, text in enumerate(COMM.allgather(c.check())) if text]
        say(f"checked {c.name}" if not said else f"WRONG: {said[0]}")
        wrong += said
    return wrong


def parsed() -> argparse.Namespace:
    known = [*ALGORITHMS, *BASELINES]
    names = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=float, default=25.6e6, help="elements (25.6e6)")
    parser.add_argument("--density", type=float, default=0.001, help="k/n (0.001)")
    parser.add_argument("--densities", type=lambda text: sorted(map(float, text.split(","))), metavar="D,D,...",
                        help="instead of the comparison: from which density on dense wins")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-rounds", type=int, default=3, help="rounds in which slow baselines take part (3)")
    parser.add_argument("--only", type=names, default=known, metavar="NAME,...", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--drain",
        type=float,
        metavar="BYTES",
        help="sent by all before each timing, to use up "
        "the bursts of a link that is limited by a token bucket (2^20 if SLOW_NETWORK_LINK is set)",
    )
    parser.add_argument("--wire", default="plain", choices=["auto", *WIRES], help="sparsecomm's format (plain)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables and a JSON file there")
    parser.add_argument("--name", metavar="STEM", help="name of these files")
    options = parser.parse_args()
    drain = (1 << 20 if os.environ.get("SLOW_NETWORK_LINK") else 0) if options.drain is None else options.drain
    options.drain = max(0, int(drain))
    options.n, options.only = int(options.n), set(options.only)
    options.name = options.name or f"{'densities' if options.densities else 'compare'}-{COMM.size}"
    densities = options.densities or [options.density]
    if unknown := options.only - set(known):
        parser.error(f"--only {','.join(sorted(unknown))}: expected names of {', '.join(known)}")
    if not all(0 < d <= 1 for d in densities) or options.n < 1:
        parser.error("expected n >= 1 and densities in (0, 1]")
    if min(options.rounds, options.slow_rounds) < 1:
        parser.error("expected at least one round")
    options.slow_rounds = min(options.slow_rounds, options.rounds)
    if options.densities:
        options.only &= {*SPARSE, *DENSE}
        if not options.only & set(SPARSE) or not options.only & set(DENSE):
            parser.error("--densities needs a sparse one of ours and a dense one among --only")
    return options


def outputs(options: argparse.Namespace) -> list[Path]:
    """Files to write; refused now if that cannot be done."""
    files = [options.json] if options.json else []
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        files += [options.write / f"{options.name}.json", options.write / f"{options.name}.txt"]
    for file in files:
        file.open("a").close()
    return files


def refusal(options: argparse.Namespace, files: list[Path]) -> str | None:
    """Why this run cannot be. Ranks share the memory of their machine, even if it is made to look like several."""
    machines = COMM.allgather(Path("/proc/sys/kernel/random/boot_id").read_text())
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    needed = machines.count(machines[COMM.rank]) * (ARRAYS * 4 * options.n + (400 << 20))
    full = (
        f"{needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} available: take a smaller --n"
        if needed > available
        else None
    )
    try:
        if COMM.rank == 0:
            files += outputs(options)
    except OSError as error:
        full = f"cannot write: {error}"
    return next((why for why in COMM.allgather(full) if why), None)


def main() -> int:
    options = parsed()
    files: list[Path] = []
    if why := refusal(options, files):
        return _fail(why)
    try:
        import torch

        torch.set_num_threads(config.threads())  # as many as ours
    except ImportError:
        options.only -= {"topk-gloo"}

    def say(text: str) -> None:
        if COMM.rank == 0:
            print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    links = {"measured": measured_link()}
    if (given := given_link()) is not None:
        links["given"] = given
    problem = Problem(COMM.size, options.n, max(1, round(options.density * options.n)))
    results: dict[str, Any] = header() | {"P": COMM.size, "n": options.n, "wire": options.wire, "drain": options.drain}
    if not options.densities:
        results["message"] = {"bytes": problem.k * problem.entry_bytes}
        results["message"]["ms"] = message_time(results["message"]["bytes"]) * 1e3
    results["links"] = {source: {"alpha": link.alpha, "beta": link.beta} for source, link in links.items()}
    tables: list[Table] = []
    wrong: list[str] = []
    inputs = Inputs(options.n, problem.k)
    if options.densities:
        rows = []
        for density in options.densities:
            say(f"density {density:g}")
            inputs.k = max(1, round(density * options.n))
            found = list(contenders(inputs, options, say))
            wrong += checked(found, say)
            rows.append(density_row(density, measure(found, options, lambda text: None)))
        results |= {"densities": rows, "crossings": {kind: crossing(rows, kind) for kind in ("step", "exchange")}}
        tables.append(density_table(rows))
    else:
        found = list(contenders(inputs, options, say))
        wrong += checked(found, say)
        times = measure(found, options, say)
        ours = [c.name for c in found if isinstance(c, Ours)]
        results |= {"density": options.density, "k": problem.k, "times": timing_rows(found, times)}
        results |= {"bounds": bound_rows(ours, times, problem, links), "ratios": ratio_rows(times)}
        tables = [timing_table(results["times"])]
        tables += [bound_table(results["bounds"], links)] if results["bounds"] else []
        tables += [ratio_table(results["ratios"])] if results["ratios"] else []
        for c in found:
            c.close()
    results["wrong"] = wrong
    if COMM.rank == 0:
        publish(results, tables, links, files)
    return 1 if wrong else 0


def publish(results: dict[str, Any], tables: list[Table], links: dict[str, Link], files: list[Path]) -> None:
    what = f"P = {results['P']}, n = {results['n']:,}" + (f", k = {results['k']:,}" if "k" in results else "")
    lines = [
        f"# {results['command']}",
        f"# {results['machine']}; {results['mpi']}",
        f"# {results['versions']}, {results['date']}",
        f"# {results['settings']}",
        f"# {what}; {link_text(links)}",
        *message_lines(results),
        f"# MPI's allreduce is {'its ring' if launched_ring() else 'the one it chooses'}",
        f"# {len(results['wrong'])} results wrong" + "".join(f"\n# WRONG: {text}" for text in results["wrong"]),
    ]
    for file in (None, *files):
        if file is not None and file.suffix != ".txt":
            file.write_text(json.dumps(_finite(results), indent=1) + "\n")
            continue
        with file.open("w") if file else open(os.dup(1), "w") as to:
            console = Console(width=200, file=to, force_terminal=False)
            console.print("\n".join(lines), *tables, sep="\n", highlight=False, markup=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fail(why: str) -> int:
    if COMM.rank == 0:
        print(f"compare.py: {why}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
