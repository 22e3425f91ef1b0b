"""One call on one rank: its arguments, what it may leave behind, and a signal that interrupts it at a random time."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from greenlet import getcurrent
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data, reference

ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
N, K = 64, 5
UNTOUCHED = 77.5  # in out before a call; no result has it
SIMULATED = str(Path(simulated.__file__).parent) + os.sep  # stands for MPI and the network


def integers(*numbers: int) -> NDArray[Any]:
    return data.integers(N, "float32", sum(numbers), 5)


class Interrupted(BaseException):
    """Raised by the signal's handler."""


@dataclass
class Call:
    """A rank's part of a call. ``before`` and ``held`` are the residual as it was, and with x."""

    algorithm: str
    x: NDArray[Any]
    residual: NDArray[Any]
    out: NDArray[Any] = field(default_factory=lambda: np.full(N, UNTOUCHED, np.float32))
    error: BaseException | None = None
    number: int = 0  # of this rank's last call on the communicator, which may be a measurement of links

    def __post_init__(self) -> None:
        self.before = self.residual.copy()
        self.held = self.before + self.x

    @classmethod
    def numbered(cls, number: int, seed: int, rank: int, P: int) -> tuple[Call, list[NDArray[Any]]]:
        """Return a rank's part of call ``number``, and what each rank brings into it."""
        seeds = [seed + 2 * (number * P + other) for other in range(P)]
        calls = [cls(ALGORITHMS[number % len(ALGORITHMS)], integers(s), integers(s, 1)) for s in seeds]
        return calls[rank], [call.held for call in calls]

    def make(self, comm: Any, within: AbstractContextManager[Any] | None = None) -> None:
        options = {"algorithm": self.algorithm, "residual": self.residual, "out": self.out}
        try:
            with within or nullcontext():
                sc.sparse_allreduce(self.x, K, comm=comm, **options)
        except (Interrupted, Exception) as error:
            self.error = error
        self.number = sc.last_call(comm).number

    @property
    def untouched(self) -> bool:
        return np.array_equal(self.residual, self.before) and bool(np.all(self.out == UNTOUCHED))

    @property
    def kept(self) -> bool:
        return np.array_equal(self.residual, self.held)

    def right(self, held: list[NDArray[Any]]) -> bool:
        return np.array_equal(self.out, self._total(held))

    def committed(self, held: list[NDArray[Any]]) -> bool:
        """Return whether the result and the residual are those of a finished call."""
        total = self._total(held)
        expected = self.held
        if self.algorithm in ("split", "allgather"):  # what this rank has selected, and the result contains, is gone
            selected = reference.dense(reference.topk(self.held, K), N) != 0
            sent = selected if self.algorithm == "allgather" else selected & (total != 0)
            expected = np.where(sent, 0, self.held)
        outside = total == 0 if self.algorithm in ("tree", "butterfly") else slice(None)
        left = np.zeros(N) if self.algorithm == "dense" else expected
        return np.array_equal(self.out, total) and np.array_equal(self.residual[outside], left[outside])

    def _total(self, held: list[NDArray[Any]]) -> NDArray[Any]:
        return reference.dense(reference.allreduce(self.algorithm, held, K, range(len(held))), N)


class Alarm:
    """A signal at a random time whose handler raises once, within a ``with`` block, also of several greenlets.

    ``where`` is the innermost place in Python code where the handler last raised; empty if it has not since `set`.
    """

    def __init__(self, error: type[BaseException] = Interrupted) -> None:
        self.where = ""
        self._error, self._armed = error, set[Any]()
        signal.signal(signal.SIGALRM, self._handle)

    def may_raise(self, frame: FrameType | None) -> bool:
        return frame is None or not frame.f_code.co_filename.startswith(SIMULATED)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if getcurrent() in self._armed and self.may_raise(frame):
            self._armed = set()
            code = frame.f_code if frame is not None else self._handle.__code__
            self.where = f"{os.path.relpath(code.co_filename)}:{code.co_name}"
            raise self._error
        if self._armed:  # soon
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    def set(self, seconds: float) -> None:
        """Raise in so many seconds, once a greenlet is within the block; 0: never."""
        self.where = ""
        signal.setitimer(signal.ITIMER_REAL, seconds and max(seconds, 1e-6))

    def __enter__(self) -> None:
        self._armed.add(getcurrent())

    def __exit__(self, *_: object) -> None:  # the signal may still arrive in here
        self._armed.discard(getcurrent())
