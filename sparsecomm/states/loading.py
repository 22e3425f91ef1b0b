"""`load`: load a state on all ranks or on none, in three steps.

1. **Prepare.** Each rank reads, converts and checks its state in new memory. If this step changes existing objects, it
   registers functions that undo the changes. A rank that fails or is interrupted (Ctrl-C) still takes part in step 2.
2. **Compare.** The ranks gather the values that must be equal on all ranks: numbers as text, and checksums of
   everything else. A rank that failed sends its error instead. An interrupt does not end this step.
3. **Commit** on all ranks by assignments that cannot fail, or undo on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label, Pairs
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import InvalidInputError, describe, text_of
from sparsecomm.signals import Opened, deferred, interrupt_in
from sparsecomm.states.values import checksum
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport

DAMAGED = "the checkpoint may be damaged: load an older one"
Undo = list[Callable[[], object]]  # idempotent functions that undo the changes of `prepare`
Interrupts = list[BaseException]  # exceptions that signal handlers raised during a wait, to be raised afterwards
_MAX_ERROR = 1000  # characters of an error that are sent to other ranks
_INTERRUPT = "interrupt"  # follows the name of an exception that a signal handler raised
_PARTS = "parts"  # follows the text of an `OtherPartsError`


class InterruptedElsewhereError(InvalidInputError):
    """A signal handler of another rank has raised, which says nothing about the state."""


class OtherPartsError(InvalidInputError):
    """A state holds other parts of the tensors than this rank keeps; `reshard` converts the states of all ranks."""


@dataclass(frozen=True)
class Prepared:
    """A state that was read, converted and checked."""

    common: dict[str, object] = field(default_factory=dict)  # values that must be equal on all ranks, by key
    commit: Callable[[], object] = lambda: None  # adopts the state. It must not fail, and must be idempotent
    fields: dict[str, Any] = field(default_factory=dict)  # the fields of the state, for classes that extend it
    note: str = ""  # a text without line breaks that all ranks receive


@deferred
def load(
    transport: Transport,
    label: str,
    keys: Sequence[str],
    prepare: Callable[[Undo], Prepared],
    action: str = "load a state",
    interrupts: Interrupts | None = None,
) -> list[str]:
    """Load a state on all ranks, or on none. Collective.

    Args:
        transport: the ranks that take part.
        label, keys: name the call, and must be the same on all ranks. ``keys`` are the keys of ``Prepared.common``.
        prepare: step 1 above. Before each change, it appends a function to the list that it receives; the function
            undoes the change.
        action: the action in words, for error messages.
        interrupts: a list to which exceptions that signal handlers raise during step 2 are appended. The caller must
            raise them later. If ``None``, `load` raises the first one after it has committed or undone the changes.

    Returns:
        The notes of all ranks.

    Raises:
        InvalidInputError: a rank cannot load its state, or the ranks' states do not belong together. The message names
            the rank, the key, the value and the expected value. Nothing has changed on any rank.
        CollectiveMismatchError: another rank makes another call. Nothing has changed on this rank.
        TimeoutError, RankFailedError, TransportError: see `sparse_allreduce`.
    """
    rank = transport.rank
    queue_of(transport).refuse_within_call()
    undo: Undo = []
    prepared: Prepared | None = None
    own_error: BaseException | None = None
    interrupt: BaseException | None = None
    pending: Interrupts = [] if interrupts is None else interrupts
    try:
        with Opened():  # allow Ctrl-C here: ``prepare`` reads files and runs user code
            prepared = prepare(undo)
        lines = ["", prepared.note, *(compared_text(prepared.common[key]) for key in keys)]
    except BaseException as raised:  # other ranks wait for this one
        interrupt = interrupt_in(raised)
        if interrupt is not None:
            own_error, lines = interrupt, [type(interrupt).__name__, _INTERRUPT]
        else:
            own_error = _name_rank(raised, rank, action)
            lines = [text_of(own_error)[:_MAX_ERROR] or "no message", *[_PARTS] * isinstance(raised, OtherPartsError)]
    try:
        lines_by_rank, error = _gather_lines(transport, [("call", label), ("keys", [*keys])], lines, pending)
    except BaseException as raised:
        lines_by_rank, error = [], raised
    refusal: BaseException | None = None  # why no rank loads
    if lines_by_rank:
        refusal = own_error or _compare(lines_by_rank, keys, rank, action)
        error = error or refusal
    elif interrupt is not None:
        error = interrupt
    if lines_by_rank and refusal is None and prepared is not None:
        prepared.commit()
    else:
        for restore in undo:
            restore()
    if interrupts is None and pending:
        raise pending[0]
    if error is not None:
        raise error
    return [lines[1] for lines in lines_by_rank]


def _gather_lines(
    transport: Transport, label: Pairs, lines: Sequence[str], interrupts: Interrupts
) -> tuple[list[list[str]], BaseException | None]:
    """Return the lines of each rank, and an error or ``None``.

    If the gather failed, the list is empty. Otherwise the error was raised after the gather had succeeded.
    """
    printable = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    data = "\n".join(printable).encode()
    lengths, first_error = _gather(transport, label, [len(data)], interrupts)
    if not lengths:
        return [], first_error
    size = -(-max(lengths) // 8) * 8
    words, error = _gather(transport, [("call", "lines")], np.frombuffer(data.ljust(size), "<u8").tolist(), interrupts)
    texts = np.array(words, "<u8").tobytes()
    texts_by_rank = [texts[size * i : size * i + length].decode() for i, length in enumerate(lengths)] if words else []
    return [text.split("\n") for text in texts_by_rank], error or first_error


def _gather(
    transport: Transport, label: Pairs, words: list[int], interrupts: Interrupts
) -> tuple[list[int], BaseException | None]:
    """Return the words of all ranks, and an error or ``None``: see `_gather_lines`."""
    call = WordsGather(transport, words, Label.of(*label))
    handle, failure = queue_of(transport).submit(call), None
    while True:
        try:
            handle.wait()
        except BaseException as error:
            if handle.error is not error:  # a signal handler raised it
                interrupts.append(error)
                continue
            failure = error
        return (call.words if call.succeeded else []), failure


def _compare(lines_by_rank: list[list[str]], keys: Sequence[str], rank: int, action: str) -> InvalidInputError | None:
    """Return an error if a rank failed or a value differs; ``None`` if all ranks can load.

    The lines of a rank are an empty line, its note and its compared values; or its error.
    """
    for other, lines in enumerate(lines_by_rank):
        if lines[0]:
            kinds = {_INTERRUPT: InterruptedElsewhereError, _PARTS: OtherPartsError}
            return kinds.get("".join(lines[1:]), InvalidInputError)(
                f"rank {rank}: rank {other} cannot {action}, so all ranks raise. Its error: {lines[0]}"
            )
    for i, key in enumerate(keys, 2):
        if (error := check_equal(key, [lines[i] for lines in lines_by_rank])) is not None:
            return InvalidInputError(f"rank {rank}: {error}. Nothing has changed on any rank")
    return None


def check_equal(key: str, texts: Sequence[str]) -> InvalidInputError | None:
    """Return an error that names the first rank whose text differs from rank 0's text, or ``None``."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            return InvalidInputError(
                f"the states of rank 0 and rank {rank} differ in {key} ({texts[0]} and {text}); load states that all "
                "ranks saved together"
            )
    return None


def compared_text(value: object) -> str:
    """Return a number as text, or a checksum of any other plain value."""
    if type(value) is float or (type(value) is int and abs(value) < 1 << 64):
        return repr(value)
    return f"checksum {checksum(value):016x}"


@contextmanager
def reading(key: str, expected: str) -> Iterator[None]:
    """Convert exceptions in this context into an `InvalidInputError` for the part ``key`` of a state."""
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"state: reading {key} raised {describe(error)}; expected {expected}; {DAMAGED}"
        ) from error


def as_float(value: Any, key: str, shape: tuple[int, ...], dtype: DType, copy: bool = True) -> Array:
    """Return an array of a state as a flat NumPy array in the accumulator dtype of ``dtype``.

    Without ``copy``, it is a view of ``value`` if that has the accumulator dtype and is contiguous.
    """
    with reading(key, f"an array of floats of shape {shape}"):
        array = np.asarray(value)
        if array.dtype.kind != "f":
            raise InvalidInputError(f"state: {key} has elements of type {array.dtype}; expected floats; {DAMAGED}")
        if array.shape != shape:
            raise InvalidInputError(f"state: {key} has shape {array.shape}; expected {shape}")
        with np.errstate(all="ignore", over="raise"):
            return array.astype(dtype.accumulator, order="C", copy=copy).reshape(-1)


def _name_rank(error: BaseException, rank: int, action: str) -> InvalidInputError:
    """Return an exception of this rank as an `InvalidInputError` that names the rank."""
    text = text_of(error)
    if not isinstance(error, InvalidInputError):
        text = f"trying to {action} raised {describe(error)}"
    elif text.startswith(f"rank {rank}: "):
        return error
    named = (OtherPartsError if isinstance(error, OtherPartsError) else InvalidInputError)(f"rank {rank}: {text}")
    named.__cause__ = error
    return named
