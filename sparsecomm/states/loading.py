"""Load a state on all ranks, or on none. `load` is the only place that does so.

1. **Prepare.** Each rank reads, converts and checks its state in new memory. Nothing has changed yet, or it can be
   undone. A rank that raises, also because of Ctrl-C, still takes part in the comparison, so that nobody waits for it.
2. **Compare.** The ranks gather one 64-bit word for each key that must be alike: the number itself or a checksum. A
   rank that failed sends the reason instead. This is one collective call. An interrupt does not end it.
3. **Commit** on all ranks by assignments that cannot fail, or undo on all ranks.

This module is compiled, so no signal handler runs between the comparison and the commit.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.states.values import checksum, from_bytes, to_bytes
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport

__all__ = ["DAMAGED", "Prepared", "Undo", "as_float", "decide", "error_text", "gather_values", "load", "reading"]

DAMAGED = "the checkpoint may be damaged: load an older one"
_REASON = 60  # words for the reason why a rank cannot load its state
Undo = list[Callable[[], object]]  # restores what `prepare` has changed; each must be idempotent


@dataclass(frozen=True)
class Prepared:
    """A state that was read, converted and checked.

    Attributes:
        common: what all ranks must have alike, by key. Integers of 64 bits and floats are sent as they are; of other
            values, checksums are compared.
        commit: adopts the state. It cannot fail, and is idempotent.
        fields: the fields of the state, for those that extend it.
    """

    common: dict[str, object]
    commit: Callable[[], object]
    fields: dict[str, Any] = field(default_factory=dict)


def load(
    transport: Transport,
    what: str,
    keys: Sequence[str],
    prepare: Callable[[Undo], Prepared],
    does: str = "load a state",
) -> None:
    """Load a state on all ranks, or on none. Collective.

    Args:
        transport: of the ranks that take part.
        what: identifies the call; the same on all ranks.
        keys: the keys of ``Prepared.common``; the same on all ranks.
        prepare: see above. Before it changes anything, it appends to its argument a function that undoes the change.
        does: the action, for error messages.

    Raises:
        InvalidInputError: some rank cannot load its state, or the ranks' states do not belong together. The message
            names the rank, the key, the value and the expected value. Nothing has changed on any rank.
        CollectiveMismatchError: another rank makes another call. Nothing has changed here.
        TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
    """
    if (interrupt := decide(transport, what, keys, prepare, does)) is not None:
        raise interrupt


def decide(
    transport: Transport, what: str, keys: Sequence[str], prepare: Callable[[Undo], Prepared], does: str
) -> BaseException | None:
    """Do what `load` does. If an interrupt came while the ranks decided to load, return it instead of raising it."""
    queue, rank = queue_of(transport), transport.rank
    queue.refuse_within_call()
    undo: Undo = []
    count = 1 + max(_REASON, len(keys))
    gather, interrupted = _new_gather(transport, count, f"load {what} {[*keys]}")  # before anything changes
    prepared: Prepared | None = None
    refused: BaseException | None = None
    try:
        if interrupted is not None:
            raise interrupted
        prepared = prepare(undo)
        words = [1, *(_word(prepared.common[key]) for key in keys)]
    except BaseException as error:  # other ranks must not wait for this one
        refused = _refusal(error, rank, does)
        words = [0, *_words_of_text(error_text(refused))]
    gather.words = words + [0] * (count - len(words))
    interrupt, failed = _wait(queue.submit(gather))
    if not gather.succeeded:
        loads = False
        if isinstance(failed, CollectiveMismatchError):
            mismatch = CollectiveMismatchError(f"a rank does not {does}. {failed}")
            mismatch.__cause__ = failed
            failed = mismatch
        if not isinstance(refused, Exception):
            failed = refused or failed
    else:
        by_rank = [gather.words[i : i + count] for i in range(0, len(gather.words), count)]
        decided = refused or _refused_by(by_rank, rank, does)
        if decided is None and prepared is not None and (different := _difference(by_rank, keys, prepared.common)):
            decided = InvalidInputError(f"rank {rank}: {different}")
        loads, failed = decided is None, failed or decided
    if loads and prepared is not None:
        prepared.commit()
    else:
        for put_back in undo:
            put_back()
    if failed is not None:
        raise interrupt or failed
    return interrupt


def gather_values(
    transport: Transport, what: str, make: Callable[[], object], does: str
) -> tuple[list[Any], BaseException | None]:
    """Return the values of all ranks, in order of rank. Collective.

    An interrupt of the wait is returned, too: raise it in ``prepare`` of the call that follows, so that the other ranks
    do not wait for this one.

    Args:
        transport, what, does: as in `load`.
        make: returns this rank's value: see `sparsecomm.states.values`.

    Raises:
        InvalidInputError: ``make`` has raised on some rank. All ranks raise.
        TimeoutError, RankFailedError, TransportError: as `load`.
    """
    data = np.empty(0, np.uint8)

    def prepare(undo: Undo) -> Prepared:
        nonlocal data
        data = to_bytes(make())
        return Prepared({}, lambda: None)

    interrupts = [decide(transport, what, [], prepare, does)]

    def gather(words: list[int]) -> list[int]:
        call, interrupt = _new_gather(transport, len(words), what)
        call.words = words
        interrupts.append(interrupt)
        interrupt, failed = _wait(queue_of(transport).submit(call))
        interrupts.append(interrupt)
        if failed is not None:
            raise failed
        return call.words

    lengths = gather([len(data)])
    padded = np.zeros(-(-max(lengths) // 8) * 8, np.uint8)
    padded[: len(data)] = data
    rows = np.array(gather(padded.view("<u8").tolist()), "<u8").reshape(transport.size, -1).view(np.uint8)
    values = [from_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
    return values, next((each for each in interrupts if each is not None), None)


def _new_gather(transport: Transport, count: int, what: str) -> tuple[WordsGather, BaseException | None]:
    """Return the call in which ranks compare ``count`` words each, and an interrupt that came meanwhile.

    Other ranks wait for the call, so it is made again after an interrupt.
    """
    raised: BaseException | None = None
    for _ in range(3):
        try:
            return WordsGather(transport, [0] * count, zlib.crc32(what.encode()) or 1), raised
        except BaseException as error:  # noqa: PERF203
            raised = raised or error
    assert raised is not None
    raise raised


def _wait(handle: Handle) -> tuple[BaseException | None, BaseException | None]:
    """Wait for a call. Return the first interrupt of the wait, which continues, and the call's error."""
    interrupt: BaseException | None = None
    while True:
        try:
            handle.wait()
            return interrupt, None
        except BaseException as error:  # noqa: PERF203
            if handle.error is error:
                return interrupt, error
            interrupt = interrupt or error


def _refused_by(by_rank: list[list[int]], rank: int, does: str) -> InvalidInputError | None:
    """Return the error of the first rank that cannot load its state, or ``None``."""
    for other, (loads, *text) in enumerate(by_rank):
        if not loads:
            return InvalidInputError(
                f"rank {rank}: rank {other} cannot {does}, so all ranks raise. Its error: {_text_of_words(text)}"
            )
    return None


def _difference(by_rank: list[list[int]], keys: Sequence[str], common: Mapping[str, object]) -> str:
    """Describe the first difference between the ranks' states, or return an empty string."""
    for position, key in enumerate(keys, 1):
        first = by_rank[0][position]
        for rank, words in enumerate(by_rank):
            if words[position] != first:
                got, expected = (_word_text(word, common[key]) for word in (words[position], first))
                which = (
                    f"has {key} {got}, but that of rank 0 has {expected}"
                    if got
                    else (f"differs from that of rank 0 in {key}")
                )
                return (
                    f"the state of rank {rank} {which}; expected states that were saved together: load a "
                    "checkpoint that all ranks have saved. Nothing has changed on any rank"
                )
    return ""


# -- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def reading(key: str, expected: str) -> Iterator[None]:
    """Convert any exception raised while a part of a state is read into an error that names the part.

    Raises:
        InvalidInputError: an exception was raised within.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"state: reading {key} raised {type(error).__name__}: {error_text(error)}; expected {expected}; {DAMAGED}"
        ) from error


def as_float(value: Any, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return a new flat NumPy array of ``dtype``'s accumulator with the elements of a state's array.

    Raises:
        InvalidInputError: it is not an array of floats of that shape, or an element is too large for the type.
    """
    with reading(key, f"an array of floats of shape {shape}"):
        array = np.asarray(value)
        if array.dtype.kind != "f":
            raise InvalidInputError(f"state: {key} has elements of type {array.dtype}; expected floats; {DAMAGED}")
        if array.shape != shape:
            raise InvalidInputError(f"state: {key} has shape {array.shape}; expected {shape}")
        with np.errstate(over="raise"):
            return array.astype(dtype.accumulator, order="C", copy=True).reshape(-1)


# -- words ------------------------------------------------------------------------------------------------------------


def _word(value: object) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return value if _is_word(value) else checksum(value)


def _is_word(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 64


def _word_text(word: int, like: object) -> str:
    """Return the value that a word like that of ``like`` stands for; for a checksum an empty string."""
    if isinstance(like, float):
        return f"{struct.unpack('<d', struct.pack('<Q', word))[0]:g}"
    return str(word) if _is_word(like) else ""


def _words_of_text(text: str) -> list[int]:
    raw = text.encode("utf-8", "backslashreplace")[: 8 * _REASON]
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def _text_of_words(words: Sequence[int]) -> str:
    text = b"".join(word.to_bytes(8, "little") for word in words).rstrip(b"\0").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _refusal(error: BaseException, rank: int, does: str) -> BaseException:
    """Return the error that a rank raises because it failed to do what ``does`` says."""
    if not isinstance(error, Exception):
        return error
    text = error_text(error)
    if not isinstance(error, InvalidInputError):
        text = f"trying to {does} raised {type(error).__name__}: {text}"
    elif text.startswith(f"rank {rank}: "):
        return error
    made = InvalidInputError(f"rank {rank}: {text}")
    made.__cause__ = error
    return made


def error_text(error: BaseException) -> str:
    """Return the text of an error, even if its ``__str__`` fails."""
    try:
        return str(error) if isinstance(error, Exception) else type(error).__name__
    except Exception as another:
        return f"(its text raised {type(another).__name__})"
