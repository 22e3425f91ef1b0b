"""The drawings by name: algorithms, each from its trace, and bar charts of recorded results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np

from docs.drawings import bars, example, overview, run
from docs.drawings.timeline import Holdings, holdings, timeline
from docs.drawings.traces import Message, Trace, trace
from sparsecomm.primitives.communicator import Communicator

__all__ = ["PICTURES"]

_K = 64  # entries per rank: enough for `split` to give a range to each of 4 ranks


def apart(size: int, k: int = _K) -> list[np.ndarray]:
    """Return gradients whose selected indices differ between all ranks, spread evenly."""
    gradients = [np.zeros(size * k, np.float64) for _ in range(size)]
    for rank, gradient in enumerate(gradients):
        gradient[rank::size] = 1 + np.random.default_rng(rank).random(k)
    return gradients


def coded(size: int) -> list[np.ndarray]:
    """Return a gradient of one element per rank, each with a value that identifies index and rank, also in sums."""
    return [2.0 ** (rank + size * np.arange(size)) for rank in range(size)]


def whole(trace: Trace) -> list[Holdings]:
    """Return what ranks hold where every message holds sums over the whole vector."""
    return holdings(trace, [[frozenset([rank])] for rank in range(trace.size)], lambda message: [0])


def gathered(trace: Trace) -> list[Holdings]:
    """Return what ranks hold where contributions travel side by side: a part for each rank's."""
    every = range(trace.size)
    start = [[frozenset(every) if part == rank else frozenset() for part in every] for rank in every]
    makers = {index: rank for rank in every for index in range(rank, trace.n, trace.size)}  # see `apart`
    return holdings(trace, start, lambda message: sorted({makers[int(index)] for index in message.indices}))


def segments(trace: Trace) -> list[Holdings]:
    """Return what ranks hold of each element of a `coded` gradient."""

    def parts(message: Message) -> Sequence[int]:
        if message.kind == "entries":
            return [int(index) for index in message.indices]
        return [int(np.log2(value)) // trace.size for value in message.values if value]

    return holdings(trace, [[frozenset([rank])] * trace.size for rank in range(trace.size)], parts)


def ranges(trace: Trace) -> list[Holdings]:
    """Return what ranks hold of each range of indices, where the owners of ranges receive their entries first."""
    owner = {index: index % trace.size for index in range(trace.n)}  # who selected it, who may own it: see `apart`
    scatter = [message for message in trace.messages if message.kind == "entries"][: trace.size * (trace.size - 1)]
    for message in scatter:
        owner.update((int(index), message.receiver) for index in message.indices)
    start = [[frozenset([rank])] * trace.size for rank in range(trace.size)]
    return holdings(trace, start, lambda message: sorted({owner[int(index)] for index in message.indices}))


def butterfly() -> str:
    """Draw recursive doubling on a power of two."""
    recorded = trace(apart(8), _K, "butterfly")
    steps = [(1, f"step {j}: exchange with rank XOR {1 << j}, add, keep k") for j in range(3)]
    return timeline(recorded, "butterfly on 8 ranks", steps, whole(recorded))


def butterfly_fold() -> str:
    """Draw recursive doubling with a fold."""
    recorded = trace(apart(7), _K, "butterfly", delays=[0, 0, 0, 0, 0, 0, 1])
    steps = [(1, "fold: 3 pairs"), (1, "step 0"), (1, "step 1"), (1, "unfold: send the result")]
    return timeline(recorded, "butterfly on 7 ranks", steps, whole(recorded))


def tree() -> str:
    """Draw the tree of the paper."""
    recorded = trace(apart(8), _K, "tree")
    up = [(1, f"step {j}: add in pairs, keep k") for j in range(3)]
    return timeline(
        recorded, "tree on 8 ranks", [*up, *((1, f"broadcast, step {j}") for j in range(3))], whole(recorded)
    )


def split() -> str:
    """Draw the exact global top-k."""
    with mock.patch.object(Communicator, "is_latency_bound", return_value=False):  # as of many entries
        recorded = trace(apart(4), _K, "split")
    phases = [(1, "scatter: entries to owners"), (1, "first call: some magnitudes"), (1, "gather: largest sums to all")]
    return timeline(recorded, "split on 4 ranks", phases, ranges(recorded))


def double() -> str:
    """Draw the sums of ranges that their owners keep in part."""
    recorded = trace(apart(4), _K, "double")
    phases = [(1, "scatter: largest entries to owners"), (1, "gather: largest sums to all")]
    return timeline(recorded, "double on 4 ranks", phases, ranges(recorded))


def dense() -> str:
    """Draw the sum of segments."""
    with mock.patch.object(Communicator, "is_latency_bound", return_value=False):  # as of long gradients
        recorded = trace(coded(4), 1, "dense")
    phases = [(1, "scatter: segments to owners"), (1, "gather: sums to all")]
    return timeline(recorded, "dense on 4 ranks", phases, segments(recorded))


def allgather() -> str:
    """Draw the gather of all ranks' entries."""
    recorded = trace(apart(4), _K, "allgather")
    return timeline(recorded, "allgather on 4 ranks", [(1, "gather: entries to all")], gathered(recorded))


def ssar_recursive_doubling() -> str:
    """Draw SparCML's sum by recursive doubling."""
    recorded = trace(apart(8), _K, "ssar_recursive_doubling")
    steps = [(1, f"step {j}: exchange with rank XOR {1 << j}, add") for j in range(3)]
    return timeline(recorded, "ssar_recursive_doubling on 8 ranks", steps, whole(recorded))


def ssar_split_allgather() -> str:
    """Draw SparCML's sum by ranges."""
    recorded = trace(apart(4), _K, "ssar_split_allgather")
    phases = [(1, "scatter: entries to owners"), (1, "gather: all sums to all")]
    return timeline(recorded, "ssar_split_allgather on 4 ranks", phases, ranges(recorded))


def hierarchical() -> str:
    """Draw a butterfly between nodes."""
    recorded = trace(apart(8), _K, "hierarchical:butterfly", nodes=[0, 0, 1, 1, 2, 2, 3, 3])
    phases = [(1, "inside nodes: tree"), *((1, f"between nodes: butterfly, step {j}") for j in range(2))]
    phases += [(1, "inside nodes: broadcast")]
    return timeline(recorded, "hierarchical:butterfly on 4 nodes of 2 ranks", phases, whole(recorded))


PICTURES: dict[str, Callable[[], str]] = {
    name.__name__.replace("_", "-"): name
    for name in (
        butterfly,
        butterfly_fold,
        tree,
        split,
        double,
        dense,
        allgather,
        ssar_recursive_doubling,
        ssar_split_allgather,
        hierarchical,
    )
} | {"overview": overview.draw, "worked-example": example.draw, "run": run.draw}
PICTURES |= {
    "bits-per-change": bars.bits_per_change,
    "comparison": bars.comparison,
    "selection-on-a-gpu": bars.selection_on_a_gpu,
    "step-of-adamw": bars.step_of_adamw,
    "step-with-ddp": bars.step_with_ddp,
}
