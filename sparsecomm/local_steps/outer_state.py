"""The state of an outer optimizer as it comes from a checkpoint, or from another rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsecomm.calls.encoding import decode, encode
from sparsecomm.calls.loading import Prepared, Undo, load, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.outer import OuterOptimizer
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.transport import Transport

__all__ = ["SharedState", "load_outer"]


def load_outer(outer: OuterOptimizer, state: Any, specs: Mapping[str, TensorSpec], undo: Undo) -> object:
    """Let an outer optimizer load a state; return the state that it then has.

    Args:
        specs: of the parameters. An optimizer with a method ``fit`` checks that the state fits them.
        undo: to which is appended what gives it back its own. It has ``snapshot``, which returns that, or loads what
            its ``state_dict`` returned.

    Raises:
        InvalidInputError: it does not load.
    """
    with reading("outer", f"what {type(outer).__name__}.state_dict() returned"):
        if hasattr(outer, "snapshot"):
            undo.append(outer.snapshot())
        else:
            before = outer.state_dict()
            undo.append(lambda: outer.load_state_dict(before))
        outer.load_state_dict(state)
        if hasattr(outer, "fit"):
            outer.fit(specs)
        return outer.state_dict()


class SharedState:
    """An outer optimizer's state on its way to other ranks, as named arrays and plain values.

    Attributes:
        nbytes: of the state of this rank, as it would be sent; 0: it cannot be.
    """

    def __init__(self, outer: OuterOptimizer | None, specs: Mapping[str, TensorSpec]) -> None:
        self._outer, self._specs = outer, specs
        self._error: BaseException | None = None
        try:
            with reading("the outer optimizer's state_dict()", "arrays and plain values"):
                self._data = encode(None if outer is None else outer.state_dict())
        except InvalidInputError as error:
            self._data, self._error = np.empty(0, np.uint8), error
        self.nbytes = len(self._data)

    def broadcast(self, ranks: Transport, root: int, nbytes: int) -> None:
        """Give all ranks the state of rank ``root``, which has said that it is of so many bytes. Collective.

        Raises:
            InvalidInputError: it cannot be sent, or a rank cannot load it; all ranks raise it, and none has changed.
        """
        limit = (64 << 20) + 64 * sum(spec.nbytes for spec in self._specs.values())
        if not 0 < nbytes <= limit:
            why = f": {self._error}" if ranks.rank == root and self._error else ""
            raise InvalidInputError(
                f"rank {ranks.rank}: the state of rank {root}'s outer optimizer cannot be sent{why}. Expected numbers, "
                f"texts, arrays, and lists and dictionaries of such, of {limit:,} bytes at most; got {nbytes:,}"
            )
        data = self._data if ranks.rank == root else np.empty(nbytes, np.uint8)
        ranks.broadcast(data, root)

        def prepare(undo: Undo) -> Prepared:
            state = decode(data)
            if self._outer is not None and ranks.rank != root:
                load_outer(self._outer, state, self._specs, undo)
            return Prepared({"outer": state}, lambda: None)

        load(ranks, "LocalSteps.rebuild", ["outer"], prepare)
