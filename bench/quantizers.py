"""The squared error of quantizers with few bits / the sum of squares, in percent.

    python -m bench.quantizers

The values are the 64 largest of each chunk of 4,096, quantized chunk by chunk, as a rank sends them first; and sums of
what eight ranks selected, the largest of them in blocks of 64, as `split` sends them next. The ranks' vectors have half
of their numbers' size in common. ``--write STEM`` puts the table and a JSON file there.

"Table by sigma" is that of SparseLoCo (arXiv 2508.15706; src/tplr/compress.py of tplr-ai/templar), here for each chunk:
values less their mean fall into equal bins, six standard deviations in all, and become the mean of their bin. "Best" is
the smallest error of any two magnitudes beside a sign, or of any evenly spaced eight of a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors.kinds import INT2, INT4, INT8, SIGN, ValueKind

CHUNK, KEPT, RANKS = 4096, 64, 8
Values = NDArray[np.float32]  # a row for each block of 64
Quantizer = Callable[[Values], NDArray[Any]]
Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "Student t, 5": lambda rng, shape: rng.standard_t(5, shape),
    "Student t, 3": lambda rng, shape: rng.standard_t(3, shape),
}


# -- values -----------------------------------------------------------------------------------------------------------


def largest(x: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of the largest of each chunk, in order."""
    return np.sort(np.argpartition(-np.abs(x), KEPT, axis=1)[:, :KEPT], axis=1)


def tails(draw: Draw, chunks: int) -> Values:
    x = draw(np.random.default_rng(0), (chunks, CHUNK))
    return np.take_along_axis(x, largest(x), axis=1).astype(np.float32)


def sums(draw: Draw, chunks: int) -> Values:
    rng = np.random.default_rng(0)
    common, total = draw(rng, (chunks, CHUNK)), np.zeros((chunks, CHUNK))
    for _ in range(RANKS):
        x = (common + draw(rng, (chunks, CHUNK))) / 2
        chosen = largest(x)
        its = np.take_along_axis(total, chosen, axis=1) + np.take_along_axis(x, chosen, axis=1)
        np.put_along_axis(total, chosen, its, axis=1)
    flat, k = total.reshape(-1), chunks * KEPT
    return flat[np.sort(np.argpartition(-np.abs(flat), k)[:k])].reshape(-1, KEPT).astype(np.float32)


# -- quantizers -------------------------------------------------------------------------------------------------------


def ours(kind: ValueKind) -> Quantizer:
    backend = CpuBackend()
    return lambda v: backend.quantize_values(v.reshape(-1), kind)[0].reshape(v.shape)


def by_sigma(bins: int) -> Quantizer:
    def quantize(v: Values) -> NDArray[Any]:
        mean = v.mean(axis=1, keepdims=True)
        centered = v - mean
        sigma = np.sqrt(np.sum(centered**2, axis=1, keepdims=True) / (v.shape[1] - 1))
        codes = np.clip(np.rint(centered / (6 * sigma / bins) + bins // 2), 0, bins - 1)
        out = np.zeros_like(v)
        for code in range(bins):
            there = codes == code
            count = np.maximum(there.sum(axis=1, keepdims=True), 1)
            out += there * (np.sum(centered, axis=1, keepdims=True, where=there) / count + mean)
        return out

    return quantize


def between(v: Values, low: NDArray[Any], high: NDArray[Any], levels: int) -> NDArray[Any]:
    """Return values rounded to the nearest of so many magnitudes."""
    spacing = np.maximum((high - low) / (levels - 1), np.finfo(np.float32).tiny)
    level = np.clip(np.rint((np.abs(v) - low) / spacing), 0, levels - 1)
    return np.copysign(low + level * spacing, v)


def absmax(levels: int) -> Quantizer:
    def quantize(v: Values) -> NDArray[Any]:
        high = np.abs(v).max(axis=1, keepdims=True)
        return between(v, high / levels, high, levels) if levels > 1 else np.copysign(high, v)

    return quantize


def minmax(levels: int) -> Quantizer:
    return lambda v: between(v, *(f(np.abs(v), axis=1, keepdims=True) for f in (np.min, np.max)), levels)


def from_the_mean(v: Values) -> NDArray[Any]:
    """Return values as the means of those magnitudes that are below all magnitudes' mean, and of those above."""
    u = np.abs(v)
    above = u > u.mean(axis=1, keepdims=True)
    high, low = (np.mean(u, axis=1, keepdims=True, where=there) for there in (above, ~above))
    return np.copysign(np.where(above, high, low), v)


def best_of_two(v: Values) -> NDArray[Any]:
    order = np.argsort(np.abs(v), axis=1)
    u, count = np.take_along_axis(np.abs(v), order, axis=1).astype(np.float64), np.arange(1, v.shape[1])
    below = np.cumsum(u, axis=1)[:, :-1]
    above = u.sum(axis=1, keepdims=True) - below
    cut = np.argmax(below**2 / count + above**2 / (v.shape[1] - count), axis=1)[:, None]
    low, high = np.take_along_axis(below, cut, 1) / (cut + 1), np.take_along_axis(above, cut, 1) / (KEPT - 1 - cut)
    out = np.empty_like(u)
    np.put_along_axis(out, order, np.where(np.arange(KEPT) > cut, high, low), axis=1)
    return np.copysign(out, v)


def best_evenly_spaced(v: Values) -> NDArray[Any]:
    u = np.abs(v)
    low, high = u.min(axis=1, keepdims=True), u.max(axis=1, keepdims=True)
    best, smallest = np.empty_like(v), np.full((len(v), 1), np.inf)
    for begin in np.linspace(0, 0.2, 11):
        for end in np.linspace(0.4, 1, 25):
            out = between(v, low + begin * (high - low), low + end * (high - low), 8)
            error = np.sum((v - out) ** 2, axis=1, keepdims=True)
            best, smallest = np.where(error < smallest, out, best), np.minimum(error, smallest)
    return best


QUANTIZERS: list[tuple[int, str, Quantizer]] = [
    (1, "largest of 64", absmax(1)),
    (1, "mean of 64: packed_sign", ours(SIGN)),
    (2, "table by sigma, 4 bins", by_sigma(4)),
    (2, "largest of 64, and half of it", absmax(2)),
    (2, "smallest and largest of 64", minmax(2)),
    (2, "means below and above the mean", from_the_mean),
    (2, "packed_int2", ours(INT2)),
    (2, "best", best_of_two),
    (4, "table by sigma, 16 bins", by_sigma(16)),
    (4, "largest of 64 / 8, 2/8, ...", absmax(8)),
    (4, "smallest to largest of 64", minmax(8)),
    (4, "packed_int4", ours(INT4)),
    (4, "best", best_evenly_spaced),
    (8, "packed_int8", ours(INT8)),
]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--chunks", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    options = parser.parse_args()
    inputs = {name: tails(draw, options.chunks) for name, draw in DISTRIBUTIONS.items()}
    inputs |= {f"sums, {name}": sums(draw, options.chunks) for name, draw in DISTRIBUTIONS.items()}
    rows: list[dict[str, Any]] = []
    for bits, name, quantize in QUANTIZERS:
        row: dict[str, Any] = {"bits": bits, "quantizer": name}
        for column, v in inputs.items():
            error = v - quantize(v).astype(np.float64)
            row[column] = float(np.sum(error**2) / np.sum(v.astype(np.float64) ** 2))
        rows.append(row)
    columns: list[report.Column] = [(name, itemgetter(name)) for name in ("bits", "quantizer")]
    columns += [(name, report.number(name, "", 100)) for name in inputs]
    run = report.about("-m bench.quantizers", [f"--chunks={options.chunks}"], threads=1)
    report.publish(options.write, report.head(run), [report.table(rows, columns)], run | {"rows": rows})


if __name__ == "__main__":
    main()
