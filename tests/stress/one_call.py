"""A rank's part of a call of sparse_allreduce: its arguments, and what it may leave."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from tests import data, reference
from tests.stress.alarm import Interrupted

__all__ = ["ALGORITHMS", "Call", "integers"]

ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
_N, _K = 64, 5
_UNTOUCHED = 77.5  # in out before a call; no result has it


def integers(*numbers: int) -> NDArray[Any]:
    """Return whole numbers, whose sums are exact."""
    return data.integers(_N, "float32", sum(numbers), 5)


@dataclass
class Call:
    """A rank's part of a call.

    Attributes:
        error: what it raised.
        before, held: the residual as it was, and with x.
    """

    name: str
    x: NDArray[Any]
    residual: NDArray[Any]
    out: NDArray[Any] = field(default_factory=lambda: np.full(_N, _UNTOUCHED, np.float32))
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.before = self.residual.copy()
        self.held = self.before + self.x

    def make(self, comm: Any, within: AbstractContextManager[Any] | None = None) -> None:
        """Make the call."""
        try:
            with within or nullcontext():
                sc.sparse_allreduce(self.x, _K, comm=comm, algorithm=self.name, residual=self.residual, out=self.out)
        except (Interrupted, Exception) as error:
            self.error = error

    @property
    def untouched(self) -> bool:
        """Whether all is as before the call."""
        return np.array_equal(self.residual, self.before) and bool(np.all(self.out == _UNTOUCHED))

    @property
    def kept(self) -> bool:
        """Whether the gradient is in the residual."""
        return np.array_equal(self.residual, self.held)

    def right(self, everyones: list[NDArray[Any]]) -> bool:
        """Return whether the result is that of ranks which held this."""
        return np.array_equal(self.out, self._total(everyones))

    def committed(self, everyones: list[NDArray[Any]]) -> bool:
        """Return whether the result and the residual are those of a call that is done."""
        total = self._total(everyones)
        expected = self.held
        if self.name in ("split", "allgather"):  # what this rank has selected, and the result holds, is gone
            selected = reference.dense(reference.topk(self.held, _K), _N) != 0
            expected = np.where(selected if self.name == "allgather" else selected & (total != 0), 0, self.held)
        outside = total == 0 if self.name in ("tree", "butterfly") else slice(None)
        left = np.zeros(_N) if self.name == "dense" else expected
        return np.array_equal(self.out, total) and np.array_equal(self.residual[outside], left[outside])

    def _total(self, everyones: list[NDArray[Any]]) -> NDArray[Any]:
        return reference.dense(reference.allreduce(self.name, everyones, _K, range(len(everyones))), _N)
