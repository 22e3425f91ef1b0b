"""Print digests of what sparsecomm computes from fixed inputs: the same lines on every processor.

    python packaging/bits.py > here; ssh elsewhere python packaging/bits.py | diff here -

There is a line for every selection, and for every algorithm on 5 simulated ranks of 2 nodes, of each element type. A
digest is of the bits of results and residuals, over all wire formats. Of NaN in residuals it says only where they are:
they come from an addition, and processors differ in the NaN that they make. The inputs are made of integers and powers
of two, without functions that differ between systems. It needs greenlet and ml_dtypes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from sparsecomm.wire.formats import WIRES

DTYPES = ("float16", ml_dtypes.bfloat16, "float32", "float64")
NODE_OF_RANK = (0, 0, 0, 1, 1)


def gradients(dtype: object, count: int, size: int) -> Iterator[np.ndarray]:
    """Yield arrays of values around 1, of which some are subnormal, infinite, NaN, or minus zero."""
    rng = np.random.default_rng([count, size])
    for _ in range(count):
        x = rng.integers(-(2**20), 2**20, size) * 2.0 ** rng.integers(-28, -18, size)
        special = rng.random(size)
        for i, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 2.0**-24, 2.0**-140)):
            x[(special > i * 2**-10) & (special < (i + 1) * 2**-10)] = value
        yield x.astype(np.dtype(dtype))


class Digest:
    """Of arrays, in the order in which they are added."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def add(self, entries: sc.SparseVector, residual: np.ndarray) -> None:
        is_nan = residual != residual
        for array in (entries.indices, entries.values, np.where(is_nan, np.zeros_like(residual), residual), is_nan):
            self.sha.update(f"{array.dtype} {array.shape}".encode())
            self.sha.update(np.ascontiguousarray(array).tobytes())

    def __str__(self) -> str:
        return self.sha.hexdigest()[:32]


def selections(dtype: object) -> Digest:
    """Digest top-k at every density, by all, by chunk and by threshold, and the merging of what they give."""
    digest = Digest()
    for size in (1, 63, 4097, 200_000):
        x, residual, *more = gradients(dtype, 4, size)
        for k in {1, max(1, size // 1000), max(1, size // 20), size}:
            kept = residual.copy()
            a = sc.topk(x, k, residual=kept)
            digest.add(a, kept)
            digest.add(sc.merge_topk(a, sc.topk(more[0], k), k), more[0])
            digest.add(sc.threshold(x, 1.5, residual=kept), kept)
    return digest


def exchange(algorithm: str, dtype: object, op: str) -> Digest:
    """Digest what all ranks have after two steps in every wire format."""
    digest = Digest()
    for wire in ("plain", "packed") if dtype == "float64" else WIRES:

        def steps(
            transport: simulated.SimulatedTransport, wire: str = wire
        ) -> list[tuple[sc.SparseVector, np.ndarray]]:
            x = list(gradients(dtype, len(NODE_OF_RANK), 3001))[transport.rank]
            residual, done = np.zeros_like(x), []
            for _ in range(2):
                result = sc.sparse_allreduce(
                    x, 70, comm=transport, algorithm=algorithm, wire=wire, op=op, residual=residual
                )
                done.append((result, residual.copy()))
            return done

        for rank in simulated.run(len(NODE_OF_RANK), steps, node_of_rank=NODE_OF_RANK):
            for result, residual in rank.value or ():
                digest.add(result, residual)
    return digest


def main() -> None:
    for dtype in DTYPES:
        name = np.dtype(dtype).name
        print(f"{selections(dtype)}  selection {name}", flush=True)
        for algorithm in sc.algorithms():
            for op in ("sum", "mean"):
                print(f"{exchange(algorithm, dtype, op)}  {algorithm} {op} {name}", flush=True)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
