"""`check_weights`: check that all ranks hold the same tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparsecomm.calls.arguments import naming_rank
from sparsecomm.calls.collectives import WordsComparison
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, WeightMismatchError
from sparsecomm.signals import deferred
from sparsecomm.tensors import interop
from sparsecomm.transport import Comm, Transport, transport_of
from sparsecomm.transport.control import format_ranks

__all__ = ["WeightComparison", "check_every", "check_weights", "compare_weights"]


@deferred
@naming_rank
def check_weights(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, comm: Comm = None) -> None:
    """Check that all ranks hold the same tensors, bit for bit. Collective: every rank calls it, with the same names.

    Ranks compare a 64-bit checksum per tensor, so they send 8 bytes per tensor. Each rank reads its tensors once, at a
    few GB/s, after copying them to the host if they are on a GPU. With one rank it does nothing.

    Args:
        tensors: names and tensors, as a dictionary or as pairs, such as ``model.state_dict()``: of NumPy, PyTorch, JAX,
            CuPy, or any library with ``__dlpack__`` in host memory, of any dtype. Of a DTensor, this rank's shard is
            compared. Values that are not tensors are ignored.
        comm: as in `sparse_allreduce`.

    Raises:
        WeightMismatchError: a tensor differs. Every rank raises it. The message names the first tensor that differs,
            and the first rank on which it differs from rank 0.
        CollectiveMismatchError: the ranks' tensors differ in number, order, names, types or shapes, or a rank makes
            another call.
        InvalidInputError: an argument is not supported. Nothing was sent.
        TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
    """

    def call(make: Callable[[Transport], WeightComparison]) -> WeightComparison:
        transport = transport_of(comm)
        comparison = make(transport)
        if transport.size > 1:
            queue_of(transport).call(comparison)
        return comparison

    compare_weights(tensors, call)


@deferred
def compare_weights(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    call: Callable[[Callable[[Transport], WeightComparison]], WeightComparison],
) -> None:
    """Check weights as `check_weights` does.

    ``call(make)`` finds the transport, makes the collective call ``make(transport)``, and returns that comparison.
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
        """Compute the checksums of tensors, unless there is only one rank."""
        self._descriptions: list[str] = []
        checksums = []
        for name, tensor in named if transport.size > 1 else ():
            description, data = interop.content(tensor, name)
            self._descriptions.append(f"{name}, {description}")
            checksums.append(zlib.crc32(data.data) << 32 | zlib.adler32(data.data))
        super().__init__(transport, checksums, zlib.crc32(repr(["weights", *self._descriptions]).encode()) or 1)

    def check(self) -> None:
        """Raise `WeightMismatchError` if the call has found a difference."""
        tensors, firsts = self._descriptions, self.words
        if tensors and (first := min(firsts)) < len(tensors):
            rank = firsts.index(first)
            differing = [r for r, position in enumerate(firsts) if position < len(tensors)]
            raise WeightMismatchError(
                f"{tensors[first]}: the weights of rank {rank} differ from rank 0's. Of {len(tensors)} tensors, "
                f"this is the first that differs; {format_ranks(differing)} of {len(firsts)} differ from rank 0. "
                "Give all ranks the same weights: load the same checkpoint, or broadcast them (PyTorch: "
                "sparsecomm.torch.broadcast_parameters). If your program moves weights before the exchange and moves "
                "them back (SAM, perturbed or averaged weights), do not broadcast: pass check_weights_every=None"
            )


def check_every(every: object) -> int | None:
    """Check and return the option ``check_weights_every``."""
    if every is None:
        return None
    if (steps := to_int(every)) is not None:
        return steps
    raise InvalidInputError(
        f"check_weights_every={quote(every)}: expected a number of steps, 0 for the first step only, or None"
    )
