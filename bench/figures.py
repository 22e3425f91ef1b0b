"""Figures of selection, merging and packing on one thread: ratios of two actions that are timed in turn in one run.

    python -m bench.figures

``--write FOLDER`` writes the table and a JSON file there, with the machine, the versions and the command.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import sparsecomm as sc
from bench import report
from bench.report import interval, number, yes_or_no
from bench.timing import seconds
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16
from sparsecomm.tensors.kinds import INT2
from sparsecomm.tensors.sparse import SparseVector

Action = Callable[[], Any]


def paired(ours: Action, theirs: Action, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of both, timed in turn, so that changes of the machine's speed affect both."""
    ours(), theirs()
    times = np.array([(seconds(ours), seconds(theirs)) for _ in range(rounds)])
    return times[:, 0], times[:, 1]


class Figures:
    """The table, row by row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def ratio(
        self,
        what: str,
        ours: Action,
        against: str,
        theirs: Action,
        target: float,
        rounds: int = 21,
        faster: bool = False,
    ) -> None:
        """Add a row: the time of ours / theirs, at most ``target``; if ``faster``, theirs / ours, at least that."""
        a, b = paired(ours, theirs, rounds)
        self.add(what, b / a if faster else a / b, against, target, a, b, ">=" if faster else "<=")

    def add(
        self,
        what: str,
        measured: np.ndarray,
        against: str,
        target: float,
        ours: np.ndarray | None = None,
        theirs: np.ndarray | None = None,
        sense: str = "<=",
    ) -> None:
        """Add a row: a ratio against something or, in the unit ``against``, an absolute figure."""
        q1, median, q3 = report.quartiles(measured)
        ours_ms, theirs_ms = (None if times is None else float(np.median(times)) * 1e3 for times in (ours, theirs))
        row = {"what": what, "ours_ms": ours_ms, "against": against, "theirs_ms": theirs_ms, "ratio": median}
        met = median >= target if sense == ">=" else median <= target
        self.rows.append(row | {"quartiles": [q1, q3], "target": target, "sense": sense, "met": met})

    def table(self) -> Table:
        columns = [
            ("what", lambda row: row["what"]),
            ("ours, ms", number("ours_ms")),
            ("against", lambda row: row["against"]),
            ("theirs, ms", number("theirs_ms")),
            ("ratio or value", number("ratio", ".2f")),
            ("quartiles", interval("quartiles", ".2f")),
            ("target", lambda row: f"{row['sense']} {row['target']:g}"),
            ("met", yes_or_no),
        ]
        return report.table(self.rows, columns)


def selection(figures: Figures, sizes: Sequence[int]) -> None:
    """Measure selection and merging on one thread; most figures are of the first size."""
    backend = CpuBackend(threads=1)
    rng = np.random.default_rng(0)

    def topk(x: np.ndarray, k: int, residual: np.ndarray | None = None) -> Action:
        t, r = interop.tensor(x, "x"), None if residual is None else interop.tensor(residual, "r", writable=True)
        return lambda: backend.topk(t, k, r)

    for n in sizes:
        x = rng.standard_normal(n, dtype=np.float32)
        name = f"top-k, n = {n / 1e6:g}M, density "
        figures.ratio(f"{name}0.001", topk(x, n // 1000), "np.max", lambda x=x: np.max(x), 1.25)
        if n == sizes[0]:
            for density in (0.0001, 0.01, 0.05):
                figures.ratio(f"{name}{density}", topk(x, int(n * density)), "np.max", lambda x=x: np.max(x), 1.5)
        try:
            import torch
        except ImportError:
            continue
        torch.set_num_threads(1)
        tensor, k = torch.from_numpy(x), n // 1000
        theirs = lambda x=tensor, k=k: x[torch.topk(x.abs(), k).indices]  # noqa: E731 - the same entries, by torch
        figures.ratio(f"{name}0.001", topk(x, k), "torch.topk(x.abs(), k)", theirs, 80, rounds=7, faster=True)
    n = sizes[0]
    x = rng.standard_normal(n, dtype=np.float32)
    r, plain = np.zeros_like(x), np.zeros_like(x)
    fused = f"residual + x and top-k, n = {n / 1e6:g}M, density 0.001"
    figures.ratio(fused, topk(x, n // 1000, r), "np.add(r, x, out=r)", lambda: np.add(plain, x, out=plain), 1.1)

    chunked = interop.tensor(x, "x"), 64, 4096, interop.tensor(r, "r", writable=True), 0.95
    decayed = f"0.95 residual + x and 64 of each chunk of 4,096, n = {n / 1e6:g}M"
    add = lambda: np.add(plain, x, out=plain)  # noqa: E731
    figures.ratio(decayed, lambda: backend.topk_by_chunk(*chunked), "np.add(r, x, out=r)", add, 1.4)

    half = x.astype(np.float16)
    brain = (x.view(np.uint32) >> 16).astype(np.uint16)
    for name, bits, dtype in (("float16", half.view(np.uint16), FLOAT16), ("bfloat16", brain, BFLOAT16)):
        t, signed = interop.tensor(bits.view(np.float16), name), bits.view(np.int16)
        t = interop.Tensor(t.pointer, t.size, t.shape, dtype, t.device, True, t.owner)
        run = lambda t=t: backend.topk(t, n // 1000, None)  # noqa: E731
        figures.ratio(
            f"top-k, {name}, n = {n / 1e6:g}M, density 0.001", run, "np.max of int16", lambda s=signed: np.max(s), 1.5
        )

    k = n // 1000
    block = np.zeros_like(x)
    block[n // 3 : n // 3 + n // 500] = x[: n // 500] * 1e3
    hard = {
        "all equal": np.full_like(x, 1.5),
        "sorted": np.sort(x),
        "one block": block,
        "mostly zero": np.where(np.arange(n) % 1500 == 0, x, np.float32(0)),
    }
    for name, v in hard.items():
        figures.ratio(f"top-k, {name}", topk(v, k), "the same of normal data", topk(x, k), 4)
    for k in (25_600, 262_144):
        spread = k * 1000
        a, b = (random_entries(k, spread, seed) for seed in (1, 2))
        times = np.array([seconds(lambda: backend.merge_topk(a, b, k)) for _ in range(41)][5:])  # noqa: B023
        figures.add(f"merge and reselect, k = {k:,}", times * 1e9 / (2 * k), "ns per input entry", 6, times)
    _packing(figures, n)
    _memory(figures, n, n // 100)


def _packing(figures: Figures, n: int) -> None:
    """Measure packed entries of few bits at a density of 64 / 4,096."""
    backend, entries = CpuBackend(threads=1), random_entries(n // 64, n, 3)
    values, _, _ = backend.quantize_values(entries.values, INT2)
    entries = SparseVector(entries.indices, values, n)
    packed = backend.pack(entries, INT2)

    def there_and_back() -> None:
        backend.unpack(backend.pack(entries, INT2), b"", len(values), n, INT2, False)

    name = f"at 2 bits, n = {n / 1e6:g}M, k = n / 64"
    times = np.array([seconds(there_and_back) for _ in range(41)][5:])
    figures.add(f"pack and unpack {name}", times * 1e9 / len(values), "ns per entry", 3, times)
    bits = np.array([8 * packed.nbytes / len(values)])
    figures.add(f"an entry {name}", bits, "bits, index and value", 10.5)


_PEAK = """
import re, numpy as np
from pathlib import Path
from sparsecomm.tensors import interop
from sparsecomm.backends import CpuBackend
x = np.random.default_rng(0).standard_normal({n}, dtype=np.float32)
r = np.ones_like(x)
t, u = interop.tensor(x, "x"), interop.tensor(r, "r", writable=True)
resident = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = resident("VmRSS")
CpuBackend(1).topk(t, {k}, u)
print(resident("VmHWM") - before)
"""


def _memory(figures: Figures, n: int, k: int) -> None:
    """Measure the memory of a fused selection beyond x and the residual, including the result."""
    program = _PEAK.format(n=n, k=k)
    used = [
        int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout) for _ in range(5)
    ]
    name = f"peak memory of residual + x and top-k, n = {n / 1e6:g}M, k = {k:,}"
    figures.add(name, np.array(used) / k, "bytes per k, one thread", 64)


def random_entries(k: int, n: int, seed: int) -> sc.SparseVector:
    rng = np.random.default_rng(seed)
    indices = np.unique(rng.integers(0, n, k + k // 100))
    indices = np.sort(rng.permutation(indices)[:k])
    return sc.SparseVector(indices, (rng.choice([-1, 1], k) * (3.3 + rng.exponential(0.3, k))).astype(np.float32), n)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, as a trial")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write kernels.txt and kernels.json there")
    options = parser.parse_args()
    figures = Figures()
    selection(figures, [2_560_000] if options.quick else [25_600_000, 100_000_000])
    run = report.about("-m bench.figures", sys.argv[1:], threads=1)
    stem = options.write and options.write / "kernels"
    report.publish(stem, report.head(run), [figures.table()], run | {"rows": figures.rows}, width=170)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
