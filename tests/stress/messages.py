"""Damaged messages, 512 per case: each is refused, or read within its bounds.

A message may be refused with `CollectiveMismatchError`. Accepted entries must be well formed and usable by the kernels.
No message may raise another error, or make the reader allocate more than its length allows.
"""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsecomm import CollectiveMismatchError
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors.sparse import SparseVector, index_dtype
from sparsecomm.wire import EXACT, PLAIN, WIRES, CallSignature, Messages, Wire
from sparsecomm.wire.header import CALL_BYTES
from tests import sanitizers
from tests.damage import damaged

_BATCH = 512  # messages per original
_ADDRESSES = 2**28  # bytes of address space that a process may map in addition
_SIZES = (1, 2, 100, 1000, 70_001, 2**31 - 1, 2**31, 2**40, 2**62)
_DENSE = 100_000  # elements up to which accepted entries are also added to a dense vector
_BACKEND = CpuBackend(1)
_SENDER, _RANK, _ROUND = 1, 3, 2


@dataclass(frozen=True)
class _Target:
    original: NDArray[np.uint8]
    read: Callable[[NDArray[np.uint8]], list[SparseVector]]
    numbers: list[int]  # meaningful numbers in it


def _vector(n: int, nnz: int, accumulator: np.dtype, wire: Wire, rng: np.random.Generator) -> SparseVector:
    spread = n if rng.random() < 0.5 else min(n, 10 * nnz + 1)
    indices = np.unique(rng.integers(0, spread, nnz)).astype(index_dtype(n))
    values = rng.standard_normal(len(indices)).astype(accumulator)
    values[rng.random(len(values)) < 0.05] = rng.choice([np.nan, np.inf, -np.inf, 1e-42])
    values[values == 0] = 1
    vector = SparseVector.trusted(indices, values, n, (n,))
    return vector if wire.kind is EXACT else _BACKEND.quantize(vector, wire.kind)[0]


def _target(rng: np.random.Generator) -> _Target:
    wire = list(WIRES.values())[rng.integers(len(WIRES))]
    accumulator = np.dtype(np.float64 if wire.kind is EXACT and rng.random() < 0.3 else np.float32)
    n = int(rng.choice(_SIZES))
    k = min(n, int(rng.choice([1, 2, 20, 65, 300])))
    signature = CallSignature("tree", 2, 0, wire.code, n, k)
    receiver, sender = (Messages(signature, rank, accumulator, (n,), _BACKEND) for rank in (_RANK, _SENDER))
    receiver.number = sender.number = 7
    vectors = [_vector(n, k, accumulator, wire, rng) for _ in range(rng.integers(1, 4))]
    numbers = [n - 1, n, n + 1, k, k + 1, vectors[0].nnz, vectors[0].nnz + 1]

    def entries(message: NDArray[np.uint8]) -> list[SparseVector]:
        return [receiver.read_entries(message, wire, _SENDER, _ROUND)]

    def several(message: NDArray[np.uint8]) -> list[SparseVector]:
        return receiver.read_parcel(message, wire, _SENDER, _ROUND, len(vectors))[0]

    def dense(message: NDArray[np.uint8]) -> list[SparseVector]:
        receiver.read_dense(message, _SENDER, _ROUND, k)
        return []

    def words(message: NDArray[np.uint8]) -> list[SparseVector]:
        assert all(0 <= word < 2**64 for word in receiver.read_parcel(message, wire, _SENDER, _ROUND, 0)[1])
        return []

    def control(message: NDArray[np.uint8]) -> list[SparseVector]:
        raise receiver.mismatch(message.tobytes(), _SENDER)

    choices = (
        (sender.entries(vectors[0], wire, _ROUND), entries),
        (sender.entries(vectors[0], wire, _ROUND), entries),
        (sender.parcel(vectors, numbers, wire, _ROUND), several),
        (sender.dense(rng.standard_normal(k).astype(accumulator), _ROUND), dense),
        (sender.parcel((), rng.integers(0, 2 ** int(rng.integers(1, 64)), k).tolist(), PLAIN, _ROUND), words),
        (np.frombuffer(signature.pack(), np.uint8), control),
    )
    return _Target(*choices[rng.integers(len(choices))], numbers)


def _check(vectors: list[SparseVector], other: SparseVector) -> bool:
    """Return whether a rank accepts the entries; raise if accepted entries are malformed."""
    if not all(map(_BACKEND.well_formed, vectors)):
        return False
    for v in vectors:
        assert len(v.indices) == len(v.values), "as many indices as values"
        assert np.all(np.diff(v.indices) > 0), "indices that rise"
        assert not v.nnz or (v.indices[0] >= 0 and v.indices[-1] < v.size), "indices in range"
        assert np.all(v.values != 0), "no zeros"
        if v.size == other.size and v.values.dtype == other.values.dtype:
            merged, _ = _BACKEND.merge_topk(v, other, 5)
            assert merged.nnz <= 5, "a merge of five entries"
        if v.size <= _DENSE:
            v.to_dense()
    return True


def check(seed: int, number: int) -> str:
    """Check the damaged copies of a message, and return whether ranks accept some of them."""
    if not sanitizers.within() and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rng = np.random.default_rng([seed, number])
    target = _target(rng)
    other = _vector(1000, 20, np.dtype(np.float32), PLAIN, rng)
    accepted = 0
    for message in damaged(target.original, _BATCH, CALL_BYTES, target.numbers, rng):
        if number % 32 == 0:
            tracemalloc.start()
        try:
            accepted += _check(target.read(message), other)
        except CollectiveMismatchError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= 64 * len(message) + 2**20, f"reading {len(message)} bytes allocated {peak}"
    return "some messages accepted" if accepted else "all messages refused"
