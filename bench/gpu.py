"""Selection, merging and AdamW steps on a CUDA device: checked results, with floors and peers from the same run.

    python -m bench.gpu                     25.6M, 110M and 1G elements
    python -m bench.gpu --sizes 1e6,25.6e6 --write bench/results
    python -m bench.gpu --parts step --name gpu-step --write bench/results

A floor is the bytes that must move over the bandwidth of a device-to-device copy in the same run. "Replayed" is the
device's own time: the call captured into a CUDA graph and replayed over several inputs, larger together than the L2.
A residual gets a new gradient in every call and replay, as in training: adding the same one again and again would
pile up elements below the largest. "Called" is what a caller sees, Python and launches included. Peers are timed as
called, by events on the device. The library's public functions are also timed in this way, on PyTorch tensors.

`bench.gpu_steps` describes how steps are measured; "host" is the time until a step returns. "Few values" are normal
data rounded to whole numbers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench import report
from bench.report import interval, number, yes_or_no
from sparsecomm.tools import options as types

ROUNDS = 21
SHIFT = 64  # elements between the beginnings of two gradients
SETS_BYTES = 400 << 20  # inputs of one measurement together, at least: several times any L2
PARTS = ["step", "selection", "merging", "packing", "others"]
Action = Callable[[], Any]
Row = dict[str, Any]


def main() -> int:
    options = parsed()
    try:
        import cupy
        import greenlet  # noqa: F401 (simulated ranks need it)

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        print(f"bench.gpu: no CUDA device can be used: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    run = Run(options)
    bench = report.about("-m bench.gpu", sys.argv[1:]) | run.about
    stem = options.write and options.write / options.name
    try:
        for part in options.parts:
            getattr(run, part)()
    finally:  # after an interrupt, too
        lines = [*report.head(bench), f"# {run.device}, copies at {run.bandwidth / 1e9:,.0f} GB/s (read and written)"]
        lines.append(f"# {len(run.wrong)} results wrong" + "".join(f"\n# WRONG: {text}" for text in run.wrong))
        report.publish(stem, lines, [run.table()], bench | {"rows": run.rows, "wrong": run.wrong})
    return 1 if run.wrong else 0


def parsed() -> argparse.Namespace:
    parser = report.parser(__doc__, prog="python -m bench.gpu")
    parser.add_argument("--sizes", type=types.listed(types.count), default="25.6M,110M,1G", metavar="N,N,...")
    parser.add_argument("--densities", type=types.listed(types.density), default="0.001,0.01,0.03,0.09")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", default=["124M", "354M", "985M"], metavar="MODEL", help="for steps")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the table and a JSON file there")
    parser.add_argument("--name", default="gpu", help="name of these files")
    return parser.parse_args()


@dataclass(frozen=True)
class Vectors:
    """Inputs of a selection, and a new gradient for each call and replay with a residual."""

    n: int
    data: str  # what the elements are, if not normal
    inputs: list[Any]
    residuals: list[Any]
    gradients: list[Any]

    def tensors(self) -> list[Any]:
        from sparsecomm.tensors import interop

        return [interop.tensor(x, "x") for x in self.inputs]

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return gradients with residuals."""
        from sparsecomm.tensors import interop

        gradients = [interop.tensor(x, "x") for x in self.gradients]
        residuals = [interop.tensor(r, "residual", writable=True) for r in self.residuals]
        return list(zip(gradients, itertools.cycle(residuals)))


class Run:
    """One device, and the rows of its table."""

    def __init__(self, options: argparse.Namespace) -> None:
        import cupy

        from sparsecomm.backends import cuda

        self.options, self.cupy, self.backend = options, cupy, cuda.of(cupy.cuda.Device().id)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.device = properties["name"].decode()
        driver = cupy.cuda.runtime.driverGetVersion()
        self.about = {"device": self.device, "cupy": cupy.__version__, "driver": driver}
        self.bandwidth = self._copy_bandwidth()
        self.about["copy_bytes_per_second"] = self.bandwidth

    # -- what is measured -------------------------------------------------------------------------------------------

    def step(self) -> None:
        from bench import gpu_steps  # which needs PyTorch

        for name in self.options.models:
            shapes, fused = gpu_steps.shapes_of(name), None
            n = sum(map(math.prod, shapes.values()))
            what = f"{n / 1e6:.0f}M weights in {len(shapes)} tensors"
            for ranks in (0, 1, 8):  # 0: AdamW
                needed = gpu_steps.memory(n, ranks)
                self._free()
                if needed > self.cupy.cuda.runtime.memGetInfo()[0]:
                    print(f"# {what}, {ranks} ranks left out: {needed / 1e9:.0f} GB of memory needed", file=sys.stderr)
                    continue
                times = gpu_steps.measured(shapes, ranks, "cuda")
                q1, median, q3 = report.quartiles(np.array(times.seconds), 1e6)
                row: Row = {"called_us": median, "quartiles_us": [q1, q3]}
                if not ranks:
                    fused = median
                    row |= {"what": f"torch.optim.AdamW(fused=True), {what}", "floor_us": 28 * n / self.bandwidth * 1e6}
                else:
                    subject = "one rank" if ranks == 1 else f"one of {ranks} ranks"
                    target = 2.0 if ranks == 1 else 1.2
                    row |= {"what": f"SparseAdamW.step, {what}, {subject}", "target": target, "sent_bytes": times.sent}
                    row["messages_us"] = float(np.median(times.messages)) * 1e6
                    row |= {"over_fused": median / fused, "met": median <= target * fused} if fused else {}
                    row |= {"host_us": float(np.median(times.host)) * 1e6} if ranks == 1 else {}
                self.rows.append(row)

    def selection(self) -> None:
        for n in self.options.sizes:
            self._selection(n)
            self._free()

    def _selection(self, n: int) -> None:
        cupy, rng = self.cupy, self.cupy.random.default_rng(0)
        count = max(1, min(16, SETS_BYTES // (4 * n)))
        result_bytes = 16 * ROUNDS * n * max(*self.options.densities, 64 / 4096)  # of all graphs
        if 8 * n * count + result_bytes + (8 << 30) > cupy.cuda.runtime.memGetInfo()[0]:
            print(f"# {n:,} elements left out: too little memory", file=sys.stderr)
            return
        gradients = 4 * ROUNDS  # one for each call and replay with a residual
        numbers = [rng.standard_normal(n + gradients * SHIFT, dtype=np.float32) for _ in range(count)]
        residuals = [cupy.zeros(n, np.float32) for _ in numbers]
        arrays = [numbers[i % count][i * SHIFT :][:n] for i in range(gradients)]
        vectors = Vectors(n, "", [x[:n] for x in numbers], residuals, arrays)
        self._other_dtypes(vectors)
        for data in ("", " of few values", " of equal values"):
            if data == " of few values":
                for x in numbers:
                    cupy.rint(x, out=x)
            elif data:
                for x in numbers:
                    x.fill(1.5)
            vectors = replace(vectors, data=data)
            host = vectors.inputs[0].get()
            for density in self.options.densities:
                self._topk(vectors, host, density)
                self._free()
            self._by_chunk(vectors, host, 64, 4096)

    def _topk(self, vectors: Vectors, host: Any, density: float) -> None:
        import sparsecomm as sc

        n, data, inputs, residuals = vectors.n, vectors.data, vectors.inputs, vectors.residuals
        k, what = max(1, round(n * density)), f"n = {n / 1e6:g}M, density {density:g}"
        result, expected = sc.topk(inputs[0], k), sc.topk(host, k)
        self.same(f"top-k{data}, {what}", result, expected)
        alone = [lambda t=t: self.backend.topk(t, k, None) for t in vectors.tensors()]
        bytes_out = 8 * expected.nnz
        self.ours(f"top-k{data}, {what}", 4 * n + bytes_out, 1.3, alone)
        for r in residuals:
            r.fill(0)
        self.same(f"fused{data}, {what}", sc.topk(inputs[0], k, residual=residuals[0]), expected)
        fused = [lambda t=t, r=r: self.backend.topk(t, k, r) for t, r in vectors.pairs()]
        self.ours(f"residual + x and top-k{data}, {what}", 12 * n + bytes_out, 1.25, fused)
        if not data:
            self._public(what, k, vectors)
            self._peers(what, k, n, inputs, residuals)

    def _by_chunk(self, vectors: Vectors, host: Any, k: int, chunk: int) -> None:
        import sparsecomm as sc

        n, data, inputs, residuals = vectors.n, vectors.data, vectors.inputs, vectors.residuals
        what, expected = f"n = {n / 1e6:g}M, {k} of every {chunk:,}", sc.topk(host, k, chunk=chunk)
        bytes_out = 8 * expected.nnz
        self.same(f"top-k by chunk{data}, {what}", sc.topk(inputs[0], k, chunk=chunk), expected)
        alone = [lambda t=t: self.backend.topk_by_chunk(t, k, chunk, None) for t in vectors.tensors()]
        self.ours(f"top-k by chunk{data}, {what}", 4 * n + bytes_out, 1.3, alone)
        for r in residuals:
            r.fill(0)
        self.same(f"fused, by chunk{data}, {what}", sc.topk(inputs[0], k, residual=residuals[0], chunk=chunk), expected)
        fused = [lambda t=t, r=r: self.backend.topk_by_chunk(t, k, chunk, r, 0.95) for t, r in vectors.pairs()]
        self.ours(f"0.95 residual + x and top-k by chunk{data}, {what}", 12 * n + bytes_out, 1.25, fused)

    def _other_dtypes(self, vectors: Vectors) -> None:
        import sparsecomm as sc
        from sparsecomm.tensors import interop

        for dtype, density in itertools.product((np.float16, np.float64), self.options.densities):
            x = vectors.inputs[0][: vectors.n // 2].astype(dtype)
            t, k = interop.tensor(x, "x"), max(1, round(len(x) * density))
            what = f"top-k, {np.dtype(dtype)}, n = {vectors.n / 2e6:g}M, density {density:g}"
            self.same(what, sc.topk(x, k), sc.topk(x.get(), k))
            self.ours(what, x.nbytes, 1.3, [lambda t=t, k=k: self.backend.topk(t, k, None)])

    def _public(self, what: str, k: int, vectors: Vectors) -> None:
        """Measure the public functions, on PyTorch's tensors and stream."""
        import sparsecomm as sc
        from sparsecomm.transport import simulated

        try:
            import torch
        except ImportError:
            return
        xs, rs = ([torch.from_dlpack(v) for v in vs] for vs in (vectors.gradients, vectors.residuals))
        pairs, alone = list(zip(xs, itertools.cycle(rs))), 4 * vectors.n + 8 * k

        def program(comm: Any) -> None:
            reduce = [lambda x=x, r=r: sc.sparse_allreduce(x, k, comm=comm, residual=r) for x, r in pairs]
            self.called(f"sparsecomm.sparse_allreduce, one rank, {what}", alone + 8 * vectors.n, reduce)

        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)):
            self.called(f"sparsecomm.topk, {what}", alone, [lambda x=x: sc.topk(x, k) for x in xs])
            fused = [lambda x=x, r=r: sc.topk(x, k, residual=r) for x, r in pairs]
            self.called(f"sparsecomm.topk with a residual, {what}", alone + 8 * vectors.n, fused)
            simulated.run(1, program)

    def _peers(self, what: str, k: int, n: int, inputs: list[Any], residuals: list[Any]) -> None:
        cupy = self.cupy
        if n <= 110_000_000:
            self.peer(
                f"cupy.argpartition, {what}", [lambda x=x: cupy.argpartition(-cupy.abs(x), k)[:k] for x in inputs[:2]]
            )
        try:
            from pylibraft.matrix import select_k  # RAFT
        except ImportError:
            pass
        else:
            rows = [cupy.abs(x).reshape(1, -1) for x in inputs[:2]]
            self.peer(f"RAFT select_k of |x|, {what}", [lambda x=x: select_k(x, k=k, select_min=False) for x in rows])
        try:
            import torch
        except ImportError:
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)):
            xs, rs = ([torch.from_dlpack(v) for v in vs[:2]] for vs in (inputs, residuals))
            self.peer(f"torch.topk(x.abs(), k), {what}", [lambda x=x: torch.topk(x.abs(), k, sorted=False) for x in xs])

            def feedback(x: Any, r: Any) -> Any:
                r.add_(x)
                indices = torch.topk(r.abs(), k, sorted=False).indices
                values = r[indices]
                r[indices] = 0
                return indices, values

            self.peer(
                f"the same with a residual, {what}",
                [lambda x=x, r=r: feedback(x, r) for x, r in zip(xs, rs, strict=True)],
            )

    def merging(self) -> None:
        import sparsecomm as sc

        for k, target in ((25_600, 25e-6), (262_144, 60e-6)):
            n = 1000 * k
            rng = np.random.default_rng(k)
            pairs = []
            for _ in range(8):
                pair = []
                for _ in range(2):
                    indices = np.sort(rng.choice(n, k, replace=False)).astype(np.int32)
                    values = (rng.choice([-1, 1], k) * (3.3 + rng.exponential(0.3, k))).astype(np.float32)
                    pair.append((indices, values))
                pairs.append(pair)
            host = [[sc.SparseVector(i, v, n) for i, v in pair] for pair in pairs]
            there = [
                [sc.SparseVector.trusted(self.cupy.asarray(i), self.cupy.asarray(v), n, (n,)) for i, v in pair]
                for pair in pairs
            ]
            self.same(f"merge, k = {k:,}", sc.merge_topk(*there[0], k), sc.merge_topk(*host[0], k))
            self.ours(
                f"merge and reselect, k = {k:,}",
                56 * k,
                None,
                [lambda a=a, b=b, k=k: self.backend.merge_topk(a, b, k) for a, b in there],
                target,
            )

    def packing(self) -> None:
        """Values of few bits: rounded, packed and unpacked. The host waits in each."""
        import sparsecomm as sc
        from sparsecomm.backends import CpuBackend
        from sparsecomm.tensors.kinds import INT2, INT4, SIGN

        host, n = CpuBackend(1), self.options.sizes[0]
        entries = sc.topk(self.cupy.random.default_rng(2).standard_normal(n, dtype=np.float32), 64, chunk=4096)
        there, count = sc.SparseVector(entries.indices.get(), entries.values.get(), n), entries.nnz
        for kind in (INT4, INT2, SIGN):
            rounded, _ = self.backend.quantize(entries, kind)
            message, expected = self.backend.pack(rounded, kind), host.pack(host.quantize(there, kind)[0], kind)
            if message.get().tobytes() != expected.tobytes():
                self.wrong.append(f"pack, {kind.name}")
            head = expected[:16].tobytes()
            unpacked = self.backend.unpack(message, head, count, n, kind, False)
            if not all(bool((a == b).all()) for a, b in zip(unpacked, (rounded.indices, rounded.values), strict=True)):
                self.wrong.append(f"unpack, {kind.name}")
            what = f"{kind.name}, {count:,} entries"
            self.called(f"quantize, {what}", 20 * count, [lambda kind=kind: self.backend.quantize(entries, kind)])
            self.called(
                f"pack, {what}",
                8 * count + len(message),
                [lambda kind=kind, rounded=rounded: self.backend.pack(rounded, kind)],
            )
            self.called(
                f"unpack, {what}",
                8 * count + len(message),
                [lambda kind=kind, m=message, head=head: self.backend.unpack(m, head, count, n, kind, False)],
            )

    def others(self) -> None:
        """densify, and the compaction of everything above a threshold."""
        import sparsecomm as sc
        from sparsecomm.tensors import interop

        n = self.options.sizes[0]
        x = self.cupy.random.default_rng(1).standard_normal(n, dtype=np.float32)
        outs = [self.cupy.empty_like(x) for _ in range(max(1, SETS_BYTES // x.nbytes))]
        entries = sc.topk(x, n // 1000)
        targets = [interop.tensor(out, "out", writable=True) for out in outs]
        self.ours(
            f"densify, n = {n / 1e6:g}M, k = n/1000",
            4 * n,
            None,
            [lambda t=t: self.backend.densify(t, entries) for t in targets],
        )
        if not bool((outs[0].ravel()[entries.indices] == entries.values).all()):
            self.wrong.append("densify")
        self.same("threshold", sc.threshold(x, 3.0), sc.threshold(x.get(), 3.0))

    # -- measuring --------------------------------------------------------------------------------------------------

    def _free(self) -> None:
        """Return the unused memory in the pools of CuPy and PyTorch to the device."""
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def _copy_bandwidth(self) -> float:
        source = self.cupy.ones(1 << 28, np.float32)
        target = self.cupy.empty_like(source)
        times = self._times(itertools.repeat(lambda: self.cupy.copyto(target, source)))
        return float(2 * source.nbytes / np.median(times))

    def _times(self, actions: Iterator[Action]) -> np.ndarray[Any, Any]:
        """Return seconds between events around each of ROUNDS actions, after as many for warming up."""
        events = [[self.cupy.cuda.Event() for _ in range(2)] for _ in range(ROUNDS)]
        with self.stream:
            for action in itertools.islice(actions, ROUNDS):
                action()
            for (begin, end), action in zip(events, actions):  # noqa: B905 (there may be more actions)
                begin.record()
                action()
                end.record()
            self.stream.synchronize()
        return np.array([self.cupy.cuda.get_elapsed_time(*pair) for pair in events]) / 1e3

    def ours(
        self, what: str, nbytes: int, target: float | None, actions: list[Action], seconds: float | None = None
    ) -> None:
        """Add a row of ours, with a target for the time over its floor, or for the time in ``seconds``."""
        turns = itertools.cycle(actions)
        called = self._times(turns)
        graphs = []
        with self.stream:
            for action in itertools.islice(turns, 2 * ROUNDS):
                self.stream.begin_capture(self.cupy.cuda.runtime.streamCaptureModeRelaxed)
                kept = action()  # its memory is written at every replay
                graphs.append((self.stream.end_capture(), kept))
        replayed = self._times(iter([lambda g=graph: g.launch(self.stream) for graph, _ in graphs]))
        floor = nbytes / self.bandwidth
        q1, median, q3 = report.quartiles(replayed, 1e6)
        met = None if target is None and seconds is None else median * 1e-6 <= (seconds or target * floor)  # type: ignore[operator]
        self.rows.append(
            {
                "what": what,
                "called_us": float(np.median(called)) * 1e6,
                "replayed_us": median,
                "quartiles_us": [q1, q3],
                "floor_us": floor * 1e6,
                "over_floor": median * 1e-6 / floor,
                "target": target if seconds is None else seconds * 1e6,
                "met": met,
            }
        )

    def called(self, what: str, nbytes: int, actions: list[Action]) -> None:
        """Add a row of ours in which the host waits, so that it cannot be replayed."""
        seconds = float(np.median(self._times(itertools.cycle(actions))))
        self.rows.append({"what": what, "called_us": seconds * 1e6, "floor_us": nbytes / self.bandwidth * 1e6})

    def peer(self, what: str, actions: list[Action]) -> None:
        self.rows.append({"what": what, "called_us": float(np.median(self._times(itertools.cycle(actions)))) * 1e6})

    def same(self, what: str, result: Any, expected: Any) -> None:
        """Check that a result is the CPU's, bit for bit."""
        indices, values = result.indices.get(), result.values.get()
        if not np.array_equal(indices, expected.indices) or values.tobytes() != expected.values.tobytes():
            self.wrong.append(f"{what}: {len(indices)} entries that are not the CPU's {expected.nnz}")

    def table(self) -> Table:
        columns = [
            ("", lambda row: row["what"]),
            ("called, us", number("called_us", ",.1f")),
            ("host, us", number("host_us", ",.1f")),
            ("replayed, us", number("replayed_us", ",.1f")),
            ("quartiles", lambda row: interval("quartiles_us", ",.1f")(row) if "quartiles_us" in row else None),
            ("floor, us", number("floor_us", ",.1f")),
            ("over the floor", number("over_floor", ".2f")),
            ("over fused AdamW", number("over_fused", ".2f")),
            ("target", lambda row: None if row.get("target") is None else f"<= {row['target']:g}"),
            ("met", lambda row: yes_or_no({"met": None} | row)),
        ]
        return report.table(self.rows, columns)


if __name__ == "__main__":
    raise SystemExit(main())
