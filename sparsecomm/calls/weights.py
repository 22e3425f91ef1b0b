"""A check that all ranks hold the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from sparsecomm import transport
from sparsecomm.calls.agreement import WordsComparison
from sparsecomm.calls.arguments import Comm, naming_rank
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import shown, whole
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, WeightMismatchError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport.control import format_ranks

__all__ = ["check_every", "check_weights"]


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
    named = [(name, tensor) for name, tensor in interop.named(tensors) if interop.is_tensor(tensor)]
    ranks = transport.of(comm)
    if ranks.size == 1:
        return
    described, checksums = [], []
    for name, tensor in named:
        what, data = interop.content(tensor, name)
        described.append(f"{name}, {what}")
        checksums.append(_checksum(data))
    comparison = WordsComparison(ranks, checksums, zlib.crc32(repr(["weights", *described]).encode()) or 1)
    try:
        queue_of(ranks).call(comparison)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"check_weights: ranks differ in the number, order, names, types or shapes of their tensors, or make other "
            f"calls; rank {ranks.rank} has {len(named)} tensors, the first of them "
            f"{described[0] if described else 'none'}. {error}"
        ) from error
    firsts = comparison.words
    if (first := min(firsts)) < len(named):
        rank = firsts.index(first)
        differing = [r for r, position in enumerate(firsts) if position < len(named)]
        raise WeightMismatchError(
            f"{described[first]}: the weights of rank {rank} are not those of rank 0. It is the first of {len(named)} "
            f"tensors that differs; {format_ranks(differing)} of {ranks.size} differ from rank 0. Give all ranks "
            "the same: load the same checkpoint, or broadcast them (PyTorch: sparsecomm.torch.broadcast_parameters)"
        )


def check_every(every: object) -> int | None:
    """Return an option ``check_weights_every``.

    Raises:
        InvalidInputError: it is neither a number of steps nor None.
    """
    if every is None or (steps := whole(every)) is not None:
        return None if every is None else steps
    raise InvalidInputError(
        f"check_weights_every={shown(every)}: expected a number of steps, 0 for the first step only, or None"
    )


def _checksum(data: Array) -> int:
    return zlib.crc32(data.data) << 32 | zlib.adler32(data.data)
