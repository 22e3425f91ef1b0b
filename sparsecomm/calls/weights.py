"""A check that all ranks hold the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparsecomm import transport
from sparsecomm.calls.agreement import WordsComparison
from sparsecomm.calls.arguments import Comm, naming_rank
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, WeightMismatchError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport import Transport
from sparsecomm.transport.control import format_ranks

__all__ = ["WeightComparison", "check_due", "check_every", "check_weights", "compare_weights"]


@naming_rank
def check_weights(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, comm: Comm = None) -> None:
    """Check that all ranks hold the same tensors, bit for bit. Collective: every rank calls it, with the same names.

    It compares a checksum of 64 bits for each tensor. Each rank reads its tensors once, at some GB/s, after a copy to
    the host if they are on a GPU; 8 bytes for each tensor travel. On one rank it does nothing.

    Args:
        tensors: names and tensors, or pairs of them, such as ``model.state_dict()`` or ``model.named_parameters()``: of
            NumPy, PyTorch, JAX, CuPy, or anything else with ``__dlpack__`` in host memory; of any type. Of a DTensor it
            is this rank's shard. What is no tensor is left out.
        comm: as in `sparse_allreduce`.

    Raises:
        WeightMismatchError: a tensor differs: every rank raises it, and names the first tensor, and the first rank
            whose tensor is not that of rank 0.
        CollectiveMismatchError: the ranks' tensors differ in number, order, names, types or shapes, or a rank makes
            another call.
        InvalidInputError: an argument cannot be used. Nothing was sent.
        TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
    """

    def call(make: Callable[[Transport], WeightComparison]) -> WeightComparison:
        ranks = transport.transport_of(comm)
        comparison = make(ranks)
        if ranks.size > 1:
            queue_of(ranks).call(comparison)
        return comparison

    compare_weights(tensors, call)


def compare_weights(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    call: Callable[[Callable[[Transport], WeightComparison]], WeightComparison],
) -> None:
    """Do as `check_weights`, by a call that `Reducer.opening_call` makes, for example.

    Args:
        tensors: as there.
        call: makes the call that the function it is given prepares, and returns it.
    """
    named = [(name, tensor) for name, tensor in interop.named(tensors) if interop.is_tensor(tensor)]
    try:
        comparison = call(lambda transport: WeightComparison(transport, named))
    except CollectiveMismatchError as error:
        first = named[0][0] if named else "none"
        raise CollectiveMismatchError(
            f"check_weights: ranks differ in the number, order, names, types or shapes of their tensors, or make other "
            f"calls; this rank has {len(named)} tensors, the first of them {first}. {error}"
        ) from error
    comparison.check()


class WeightComparison(WordsComparison):
    """The call of `check_weights`."""

    def __init__(self, transport: Transport, named: list[tuple[str, Any]]) -> None:
        """Prepare it for named tensors, which are read now, if there are other ranks."""
        self._described: list[str] = []
        checksums = []
        for name, tensor in named if transport.size > 1 else ():
            what, data = interop.content(tensor, name)
            self._described.append(f"{name}, {what}")
            checksums.append(_checksum(data))
        super().__init__(transport, checksums, zlib.crc32(repr(["weights", *self._described]).encode()) or 1)

    def check(self) -> None:
        """Check what the call has found.

        Raises:
            WeightMismatchError: tensors differ between ranks.
        """
        described, firsts = self._described, self.words
        if described and (first := min(firsts)) < len(described):
            rank = firsts.index(first)
            differing = [r for r, position in enumerate(firsts) if position < len(described)]
            raise WeightMismatchError(
                f"{described[first]}: the weights of rank {rank} are not those of rank 0. It is the first of "
                f"{len(described)} tensors that differs; {format_ranks(differing)} of {len(firsts)} differ from rank "
                "0. Give all ranks the same: load the same checkpoint, or broadcast them (PyTorch: "
                "sparsecomm.torch.broadcast_parameters)"
            )


def check_every(every: object) -> int | None:
    """Return an option ``check_weights_every``.

    Raises:
        InvalidInputError: it is neither a number of steps nor None.
    """
    if every is None or (steps := to_int(every)) is not None:
        return None if every is None else steps
    raise InvalidInputError(
        f"check_weights_every={quote(every)}: expected a number of steps, 0 for the first step only, or None"
    )


def check_due(every: int | None, step: int, checked: int | None) -> bool:
    """Return whether weights are to be compared before a step.

    Args:
        every: the option ``check_weights_every``.
        step: number of the step.
        checked: the last step before which they were compared if that was due; ``None``: none.
    """
    return every is not None and (checked is None or bool(every and step % every == 0 and checked != step))


def _checksum(data: Array) -> int:
    return zlib.crc32(data.data) << 32 | zlib.adler32(data.data)
