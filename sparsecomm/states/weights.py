"""`check_weights`: check that all ranks hold the same tensors. `FirstStep`: warnings in the first step."""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from sparsecomm.calls.arguments import naming_rank
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import NO_ENTRIES, queue_of
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError, WeightMismatchError, listed
from sparsecomm.primitives.communicator import ROUNDS, broadcast_words, gather_words
from sparsecomm.signals import deferred
from sparsecomm.states.values import digest
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Comm, Transport, transport_of
from sparsecomm.transport.control import format_ranks


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
    transport = transport_of(comm)
    comparison = WeightComparison(transport, tensors)
    if transport.size > 1:
        queue_of(transport).call(comparison)
    comparison.check()


class WeightComparison(WordsGather):
    """The call of `check_weights`. Its ``words`` become the position of each rank's first difference from rank 0."""

    name = "comparison of words"

    def __init__(self, transport: Transport, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Compute the checksums of tensors, unless there is only one rank. Values that are not tensors are ignored."""
        named = [(name, tensor) for name, tensor in interop.named(tensors) if interop.is_tensor(tensor)]
        self._descriptions: list[tuple[str, str]] = []
        checksums = []
        for name, tensor in named if transport.size > 1 else ():
            description, data = interop.content(tensor, name)
            self._descriptions.append((name, description))
            checksums.append(digest([data]))
        super().__init__(transport, checksums, Label.of(("call", "check_weights()"), *self._descriptions))

    def _exchange(self) -> SparseVector:
        expected = broadcast_words(self.comm, self.words, 0)
        differing = (i for i, (word, other) in enumerate(zip(self.words, expected, strict=True)) if word != other)
        positions = gather_words(self.comm, [next(differing, len(expected))], ROUNDS)
        self._gathered = [position for (position,) in positions]
        return NO_ENTRIES

    def check(self) -> None:
        """Raise `WeightMismatchError` if the call has found a difference."""
        tensors, firsts = self._descriptions, self.words
        if tensors and (first := min(firsts)) < len(tensors):
            rank = firsts.index(first)
            differing = [r for r, position in enumerate(firsts) if position < len(tensors)]
            raise WeightMismatchError(
                f"{', '.join(tensors[first])}: the weights of rank {rank} differ from rank 0's. Of {len(tensors)} "
                f"tensors, this is the first that differs. Of {len(firsts)} ranks, {format_ranks(differing)} "
                f"{'differs' if len(differing) == 1 else 'differ'} from rank 0. In the first step, load the same "
                "checkpoint on all ranks, or broadcast the weights (PyTorch: sparsecomm.torch.broadcast_parameters). "
                "Later, likely causes are different learning rates, or a rank that skipped a step. If your program "
                "moves weights on purpose (SAM, averaged weights), do not broadcast: pass check_weights_every=None"
            )


class FirstStep(WordsGather):
    """Compares gradients, which should differ between ranks, and buffers, which should not, in the first step.

    Equal gradients and different buffers are mistakes in some programs and intended in others, so `warn` only warns.
    """

    name = "gradients and buffers"

    def __init__(self, transport: Transport, gradients: Mapping[str, int], buffers: Mapping[str, int]) -> None:
        """Prepare the call, with checksums of gradients that are finite and not zero, and of buffers."""
        self._buffers = list(buffers)
        words = [zlib.crc32(repr(sorted(x.items())).encode()) or 1 if x else 0 for x in (gradients, buffers)]
        super().__init__(transport, words, Label.of(("call", self.name)))

    def warn(self) -> None:
        """Warn if the call has found all gradients equal, or buffers that differ."""
        gradients, buffers = self.words[::2], self.words[1::2]
        if len(gradients) > 1 and gradients[0] and len(set(gradients)) == 1:
            _warn(
                f"the gradients of the first step are the same on all {len(gradients)} ranks, bit for bit, before "
                "sparsecomm exchanges them. If another library averages them (DistributedDataParallel, Horovod, "
                "FSDP), every step sends dense gradients: train the plain model. If all ranks train on the same "
                "samples, give each rank different ones: use a DistributedSampler, or a seed by rank"
            )
        if 0 not in buffers and len(set(buffers)) > 1:
            _warn(
                f"the ranks' buffers differ after the first step ({listed(self._buffers, 3)}), since each rank updates "
                "them from its own samples. Before you evaluate or save the model, call "
                "sparsecomm.torch.broadcast_parameters(model.named_buffers()), or average them "
                "(docs/guides/troubleshooting.md, Buffers)"
            )


def _warn(text: str) -> None:
    """Warn at the line of the program that called this library, directly or through PyTorch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("sparsecomm.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def check_every(every: object) -> int | None:
    """Check and return the option ``check_weights_every``."""
    if every is not None and to_int(every) is None:
        raise InvalidInputError(
            f"check_weights_every={quote(every)}: expected a number of steps, 0 for the first step only, or None"
        )
    return to_int(every)
