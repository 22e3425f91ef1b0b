"""The contenders of benchmarks: a record for each way to sum gradients, and a table of those that ship here.

`bench.contenders` adds what others do to the table. A runner is a contender at work on vectors of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.algorithms import ALGORITHMS
Arguments: Any = None
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import queue_of
from sparsecomm.cli.bench.clocks import Clock, clocked_backend, clocked_transport
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.world import World, comm_of
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, ArrayDType

__all__ = ["CONTENDERS", "Contender", "Ours", "Runner", "Vectors", "inputs"]

Vector = Array
_USUAL = ("dense", "allgather", "tree", "butterfly", "split")


def inputs(n: int, dtype: ArrayDType, accumulator: ArrayDType, rank: int) -> tuple[Vector, Vector]:
    """Return a gradient and a residual of a rank, the same wherever they are made: normally distributed."""
    rng = np.random.default_rng([n, rank])
    real = np.dtype(np.float64) if accumulator.itemsize == 8 else np.dtype(np.float32)
    x, residual = (rng.standard_normal(n, dtype=real.type) for _ in range(2))
    return x.astype(dtype, copy=False), residual


class Vectors:
    """A gradient, a residual and an output of this rank, which all contenders share.

    Attributes:
        gradient, kept: in host memory: the gradient, and what the residual is before each call.
        x, before, residual, out: in the device's memory.
    """

    def __init__(self, comm: World, gradient: Vector, residual: Vector | None = None, device: str = "cpu") -> None:
        """Take a flat gradient; without a ``residual`` it is zero before each call, and x may share memory with it."""
        self.comm, self.memory, self.gradient = comm, DEVICES[device](), gradient
        self.kept = residual
        if residual is None:
            self.x, self.before = gradient, None
            self.residual, self.out = np.zeros_like(gradient), np.zeros_like(gradient)
        else:
            self.x, self.before, self.residual, self.out = map(
                self.memory.put, (gradient, residual, residual, np.zeros_like(gradient))
            )

    @property
    def n(self) -> int:
        return self.gradient.size

    def given(self, accumulator: ArrayDType) -> Vector:
        """Return residual + gradient, in host memory."""
        given = self.gradient.astype(accumulator)
        return given if self.kept is None else given + self.kept

    def reset(self) -> None:
        """Put the residual back to what it was."""
        if self.before is None:
            self.residual.fill(0)
        else:
            self.memory.assign(self.residual, self.before)
            self.memory.wait()


class Runner:
    """A contender at work. Its actions are methods without arguments, which all ranks call: `step`, and others."""

    def before(self, action: str) -> None:
        """Set up what a call starts from, outside the time."""

    def step(self) -> Any:
        """Go from gradient and residual to the dense sum in ``out``."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when all that was started on a device is done."""

    def traffic(self) -> Sequence[float]:
        """Return bytes that this rank has sent, and received, so far."""
        return ()

    def parts(self) -> dict[str, float]:
        """Return seconds of each part of the last calls, if they are timed."""
        return {}

    def close(self) -> None:
        """Give back what was opened."""


class Ours(Runner):
    """An algorithm of sparsecomm: a step is a call of `sparse_allreduce` with a residual and a dense result.

    Attributes:
        taken: the algorithm and the format that calls take, also where "auto" was asked for.
    """

    def __init__(
        self,
        name: str,
        vectors: Vectors,
        k: int,
        wire: str = "auto",
        *,
        dtype: str = "float32",
        complete: bool = False,
        breakdown: bool = False,
    ) -> None:
        self.vectors, self.k, self.comm = vectors, k, comm_of(vectors.comm)
        self.ranks = transport.of(self.comm)
        self.options = Options(name, "sum", wire, complete)
        self._asked: dict[str, Any] = {"algorithm": name, "wire": wire, "complete": complete}
        asked: dict[str, Any] = {"dtype": dtype, **self._asked}
        self.taken = sc.explain(vectors.n, k, comm=self.comm, **asked).candidates[0]
        self.clock = Clock(vectors.memory.wait) if breakdown else None
        if self.clock is not None:
            self._transport = clocked_transport(self.ranks, self.clock)
            ours = queue_of(self._transport).backends.of(interop.tensor(vectors.x, "x").device)
            self._backend = clocked_backend(ours, self.clock)

    def before(self, action: str) -> None:
        self.vectors.reset()
        if self.clock is not None:
            self.clock.reset()

    def step(self) -> sc.SparseVector:
        """Make the call. With clocks it goes the same way, from where the arguments have been checked."""
        v = self.vectors
        if self.clock is None:
            return sc.sparse_allreduce(v.x, self.k, comm=self.comm, residual=v.residual, out=v.out, **self._asked)
        arguments = Arguments.checked(v.x, self.k, v.residual, v.out, self.options)
        # A call looks them up; here it has the clocked ones instead.
        queue_of(self.ranks).backends.of(arguments.x.device)
        return queue_of(self._transport).call(arguments.collective(self._transport, self._backend))

    def wait(self) -> None:
        self.vectors.memory.wait()

    def traffic(self) -> Sequence[float]:
        return self.ranks.counters.bytes_sent, self.ranks.counters.bytes_received

    def parts(self) -> dict[str, float]:
        return {} if self.clock is None else dict(self.clock.seconds)


@dataclass(frozen=True)
class Contender:
    """One way to sum gradients over ranks: an entry of the table of contenders.

    Attributes:
        name: what the command lines take.
        kind: "ours"; "baseline", what another project does; or "mpi", calls of MPI alone.
        make: a runner on vectors, for k entries and a wire format. Collective.

            Raises:
                ValueError: it does not work here, or on so many ranks.
        times: the actions of the runner that are timed.
        oracle: the algorithm whose result it must give, see `sparsecomm.cli.oracles`; None: the dense sum.
        error: how far its result may be from that, beyond what sums round, as a part of the sum of all ranks' largest
            magnitudes; None: it must be that, to the bit.
        conserves: whether residuals and result make up all that was given.
        slow: whether a step of long gradients takes seconds.
        usual: whether it runs if nothing else is asked for.
    """

    name: str
    kind: str
    make: Callable[[Vectors, int, str], Runner]
    times: tuple[str, ...] = ("step",)
    oracle: str | None = None
    error: float | None = None
    conserves: bool = True
    slow: bool = False
    usual: bool = True


def _ours(name: str) -> Contender:
    return Contender(
        name, "ours", lambda vectors, k, wire: Ours(name, vectors, k, wire), oracle=name, usual=name in _USUAL
    )


CONTENDERS: dict[str, Contender] = {name: _ours(name) for name in ALGORITHMS}
