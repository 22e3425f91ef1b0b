"""Trace a call on simulated ranks: who sends what to whom, in which step.

Every message takes one unit of virtual time, whatever its length, and those of one moment travel together. So its
times are the numbers of steps.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from sparsecomm.wire import Messages

__all__ = ["Message", "Trace", "trace"]


@dataclass(frozen=True)
class Message:
    """A message of a call.

    Attributes:
        kind: "entries", "dense" for elements of a dense array, or "words" for counts and the like.
        sender, receiver: ranks.
        sent, received: the steps before and after which it travels.
        indices, values: of entries; of elements ``indices`` is empty, and of words both are.
        items: the number of entries, elements or words.
    """

    kind: str
    sender: int
    receiver: int
    sent: int
    received: int
    indices: np.ndarray
    values: np.ndarray
    items: int


@dataclass(frozen=True)
class Trace:
    """A traced call.

    Attributes:
        size, n, k: ranks, elements and entries per rank.
        node_of_rank: for each rank, the number of its node.
        messages: in the order in which they were sent.
        results: by rank.
        residuals: by rank, after the call.
    """

    size: int
    n: int
    k: int
    node_of_rank: Sequence[int]
    messages: list[Message] = field(default_factory=list)
    results: list[sc.SparseVector] = field(default_factory=list)
    residuals: list[np.ndarray] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps until the last message has arrived."""
        return max((message.received for message in self.messages), default=0)


def trace(
    gradients: Sequence[np.ndarray],
    k: int,
    algorithm: str,
    *,
    nodes: Sequence[int] | None = None,
    delays: Sequence[int] | None = None,
    **options: Any,
) -> Trace:
    """Run `sparse_allreduce` once with residuals of zeros, and return its trace.

    Args:
        gradients: by rank, of one shape.
        k, algorithm, options: as in `sparse_allreduce`; the wire format is plain.
        nodes: for each rank, the number of its node; ``None``: each has its own.
        delays: for each rank, the steps by which it begins late, so that its messages are drawn beside the others'.
    """
    size, residuals = len(gradients), [np.zeros_like(x) for x in gradients]
    recorded = Trace(size, gradients[0].size, k, nodes or range(size), residuals=residuals)
    under_way: dict[tuple[int, int], deque[Message]] = defaultdict(deque)

    with _contents() as contents_of:

        def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
            isend: Any = transport.isend
            receive, rank = transport.receive, transport.rank

            def traced_isend(data: Any, to: int, *args: Any) -> Any:
                request = isend(data, to, *args)
                kind, indices, values, items = contents_of(data)
                sent = round(request.free_at)  # messages take no time to leave
                under_way[rank, to].append(Message(kind, rank, to, sent, sent + 1, indices, values, items))
                return request

            def traced_receive(source: int, *args: Any) -> Any:
                data = receive(source, *args)
                message = under_way[source, rank].popleft()
                recorded.messages.append(replace(message, received=round(transport.seconds)))
                return data

            vars(transport).update(isend=traced_isend, receive=traced_receive)
            return sc.sparse_allreduce(
                gradients[rank],
                k,
                comm=transport,
                algorithm=algorithm,
                wire="plain",
                residual=residuals[rank],
                **options,
            )

        with mock.patch.dict(os.environ, SPARSECOMM_PROFILE="none"):  # so that no links are measured
            results = simulated.run(size, program, alpha=1.0, node_of_rank=nodes, delays=delays)
    recorded.messages.sort(key=lambda message: (message.sent, message.sender, message.receiver))
    recorded.results.extend(result.value for result in results if result.value is not None)
    return recorded


@contextmanager
def _contents() -> Iterator[Callable[[Any], tuple[str, np.ndarray, np.ndarray, int]]]:
    """Note what messages hold while they are made; the function that this yields tells it of a message."""
    made: dict[int, tuple[str, Any, Any]] = {}  # with the message, so that no other one takes its address

    def noting(kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Messages, what: Any, *args: Any) -> Any:
            message = make(self, what, *args)
            made[id(message)] = kind, np.array(what) if kind == "dense" else what, message
            return message

        return noted

    def contents_of(message: Any) -> tuple[str, np.ndarray, np.ndarray, int]:
        kind, what, _ = made[id(message)]
        nothing = np.zeros(0, np.int32)
        if kind == "dense":
            return kind, nothing, what, len(what)
        vectors = [what] if kind == "entries" else what
        if not vectors:
            return "words", nothing, nothing, 0
        indices = np.concatenate([v.indices for v in vectors])
        return "entries", indices, np.concatenate([v.values for v in vectors]), len(indices)

    kinds = ("entries", "parcel", "dense")
    patches = [mock.patch.object(Messages, kind, noting(kind, getattr(Messages, kind))) for kind in kinds]
    for patch in patches:
        patch.start()
    try:
        yield contents_of
    finally:
        for patch in patches:
            patch.stop()
