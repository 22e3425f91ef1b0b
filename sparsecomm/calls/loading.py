"""The one rule by which a state is loaded: every rank prepares it, all ranks compare, and all load it or none does.

1. **Prepare.** Everything is read, converted into new memory and checked. Nothing has changed yet, or can be undone.
   Whatever is raised meanwhile, also by Ctrl-C or by the checkpoint's own objects, makes the state *refused*. The rank
   takes part in the comparison all the same, so that nobody waits for it.
2. **Compare.** The ranks gather a word for each key of what must be alike: the number itself, or a checksum; a rank
   that has refused its state sends why. This is one call, whatever is loaded. An interrupt does not end the wait for
   it, which the transport's timeout bounds.
3. **Commit**, on all ranks, by assignments that cannot fail; or undo, on all.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.encoding import checksum
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport

__all__ = ["DAMAGED", "Prepared", "Undo", "as_float", "load", "reading", "told"]

DAMAGED = "the checkpoint may be damaged: load an older one"
_TEXT = 60  # words of the reason why a rank refuses its state
Undo = list[Callable[[], object]]  # what puts back what was changed to prepare; harmless if done twice


@dataclass(frozen=True)
class Prepared:
    """A state that was converted and checked.

    Attributes:
        common: what all ranks must have alike, by key: whole numbers of 64 bits and floats, which messages tell, and
            other plain values, of which checksums are compared.
        commit: takes the state over. It cannot fail, and may be called again where an interrupt has stopped it.
    """

    common: dict[str, object]
    commit: Callable[[], object]


def load(
    ranks: Transport, what: str, keys: Sequence[str], prepare: Callable[[Undo], Prepared], does: str = "load a state"
) -> None:
    """Load a state on all ranks, or on none. Collective.

    Args:
        ranks: who takes part.
        what: a name for what is loaded, the same on all ranks.
        keys: those of ``Prepared.common``, the same on all ranks.
        prepare: see above; appends to its argument, before it changes anything, what undoes that.
        does: what ranks do, in words of errors.

    Raises:
        InvalidInputError: a state cannot be loaded on some rank, or the ranks' states do not belong together. It names
            the rank, the key, what was found and what was expected. Nothing has changed on any rank.
        CollectiveMismatchError: another rank makes another call. Nothing has changed here.
        TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
    """
    queue, rank = queue_of(ranks), ranks.rank
    queue.refuse_within_call()
    undo: Undo = []
    count = 1 + max(_TEXT, len(keys))
    gather, interrupted = _gather(ranks, count, what, keys)  # before anything changes
    prepared: Prepared | None = None
    refused: BaseException | None = None
    try:
        if interrupted is not None:
            raise interrupted
        prepared = prepare(undo)
        words = [1, *(_word(prepared.common[key]) for key in keys)]
    except BaseException as error:  # nobody must wait for this rank
        refused = _refusal(error, rank)
        words = [0, *_words_of_text(told(refused))]
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
        everyones = [gather.words[i : i + count] for i in range(0, len(gather.words), count)]
        decided = refused or _refused_by(everyones, rank, does)
        if decided is None and prepared is not None and (different := _difference(everyones, keys, prepared.common)):
            decided = InvalidInputError(f"rank {rank}: {different}")
        loads, failed = decided is None, failed or decided
    if loads and prepared is not None:
        prepared.commit()
    else:
        for put_back in undo:
            put_back()
    if (raised := interrupt or failed) is not None:
        raise raised


def _gather(ranks: Transport, count: int, what: str, keys: Sequence[str]) -> tuple[WordsGather, BaseException | None]:
    """Return the call in which ranks compare ``count`` words each; and what was raised meanwhile.

    Bytecode runs here, where an interrupt may come. Then it is made once more: other ranks wait for it.
    """
    raised: BaseException | None = None
    for _ in range(3):
        try:
            return WordsGather(ranks, [0] * count, zlib.crc32(f"load {what} {[*keys]}".encode()) or 1), raised
        except BaseException as error:  # noqa: PERF203
            raised = raised or error
    assert raised is not None
    raise raised


def _wait(handle: Handle) -> tuple[BaseException | None, BaseException | None]:
    """Wait for a call; return the first interrupt of the wait, which goes on, and the error of the call."""
    interrupt: BaseException | None = None
    while True:
        try:
            handle.wait()
            return interrupt, None
        except BaseException as error:  # noqa: PERF203
            if handle.error is error:
                return interrupt, error
            interrupt = interrupt or error


def _refused_by(everyones: list[list[int]], rank: int, does: str) -> InvalidInputError | None:
    """Return the error for the first rank that has refused its state; ``None``: none has."""
    for other, (loads, *text) in enumerate(everyones):
        if not loads:
            return InvalidInputError(
                f"rank {rank}: rank {other} cannot {does}, so no rank does, and nothing has changed. It says: "
                f"{_text_of_words(text)}"
            )
    return None


def _difference(everyones: list[list[int]], keys: Sequence[str], common: Mapping[str, object]) -> str:
    """Return in words what the ranks' states have not alike; empty: nothing."""
    for position, key in enumerate(keys, 1):
        first = everyones[0][position]
        for rank, words in enumerate(everyones):
            if words[position] != first:
                got, expected = (_told_word(word, common[key]) for word in (words[position], first))
                values = f"{got}, and that of rank 0 has {expected}" if got else "another than that of rank 0"
                return (
                    f"the state of rank {rank} has {key} {values}; expected states that were saved together: load a "
                    "checkpoint that all ranks have saved; nothing has changed on any rank"
                )
    return ""


# -- what preparing a state needs -------------------------------------------------------------------------------------


@contextmanager
def reading(key: str, expected: str) -> Iterator[None]:
    """Turn what reading a part of a state raises into an error that names the part.

    Raises:
        InvalidInputError: an exception came within.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"state: reading {key} raised {type(error).__name__}: {told(error)}; expected {expected}; {DAMAGED}"
        ) from error


def as_float(value: Any, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return a new flat NumPy array of ``dtype``'s accumulator with the elements of a state's array.

    Raises:
        InvalidInputError: it is no array of floats, has another shape, or an element is too large for the type.
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


def _told_word(word: int, like: object) -> str:
    """Return in words what a word like that of ``like`` stands for; empty: it is a checksum."""
    if isinstance(like, float):
        return f"{struct.unpack('<d', struct.pack('<Q', word))[0]:g}"
    return str(word) if _is_word(like) else ""


def _words_of_text(text: str) -> list[int]:
    raw = text.encode("utf-8", "backslashreplace")[: 8 * _TEXT]
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def _text_of_words(words: Sequence[int]) -> str:
    text = b"".join(word.to_bytes(8, "little") for word in words).rstrip(b"\0").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _refusal(error: BaseException, rank: int) -> BaseException:
    """Return what a rank raises that has refused its state."""
    if not isinstance(error, Exception):
        return error
    text = told(error)
    if not isinstance(error, InvalidInputError):
        text = f"load_state_dict: reading the state raised {type(error).__name__}: {text}; {DAMAGED}"
    elif text.startswith(f"rank {rank}: "):
        return error
    made = InvalidInputError(f"rank {rank}: {text}")
    made.__cause__ = error
    return made


def told(error: BaseException) -> str:
    """Return the text of an error, also of one that has none."""
    try:
        return str(error) if isinstance(error, Exception) else type(error).__name__
    except Exception as another:  # its own `__str__` fails
        return f"(its text raised {type(another).__name__})"
