"""`Adapter`, the base class of `sparsecomm.torch.DiLoCo` and `sparsecomm.jax.LocalSteps`."""

from __future__ import annotations

from collections.abc import Iterable

from sparsecomm.local_steps.local_steps import LocalSteps
from sparsecomm.reducer import Reducer
from sparsecomm.states.schema import State, StateDict


class Adapter:
    """Forwards to a `sparsecomm.LocalSteps`, which documents these methods. Subclasses convert a framework's arrays."""

    _core: LocalSteps

    @property
    def local_step(self) -> int:
        """The number of local steps taken in this round."""
        return self._core.local_step

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._core.round

    @property
    def steps(self) -> tuple[int, ...]:
        """The number of local steps of each rank in this round."""
        return self._core.steps

    @property
    def left_out(self) -> tuple[int, ...]:
        """The ranks that were late for the latest applied exchange; the same on all ranks."""
        return self._core.left_out

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """The reducer of each fragment, with its counters and residuals."""
        return self._core.reducers

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's parameters."""
        return self._core.fragments

    def report(self) -> str:
        """Return a small table of this rank."""
        return self._core.report()

    def rest(self) -> None:
        """Disable the deadline until the next local step."""
        self._core.rest()

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop pseudo-gradients that have not been sent, of these parameters or of all. Call it on all ranks."""
        self._core.discard(names)

    def state_dict(self) -> StateDict:
        """Return this rank's state."""
        return self._core.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Load what `state_dict` returned on this rank, or `sparsecomm.reshard` made. Collective."""
        self._core.load_state_dict(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._core})"
