"""Small calls by which ranks exchange 64-bit words, such as checksums, in the order of the call queue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparsecomm.backends import CpuBackend
from sparsecomm.calls.queue import Call
from sparsecomm.primitives.communicator import ROUNDS, Communicator, broadcast_words, gather_words
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.wire import PLAIN, CallSignature, Messages

__all__ = ["NO_ENTRIES", "Realignment", "WordsComparison", "WordsGather"]

NO_ENTRIES = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))


class WordsGather(Call):
    """Gives all ranks the words of all ranks, in order of rank.

    Attributes:
        words: ints from 0 to 2^64 - 1, the same number of them on all ranks. The call replaces them by the result.
    """

    name = "words of all ranks"  # in the call signature

    def __init__(self, transport: Transport, words: list[int], label: int) -> None:
        super().__init__(transport)
        self.words = self._received = words
        self._signature = CallSignature(self.name, FLOAT32.code, 0, PLAIN.code, len(words), 0)
        host = CpuBackend()
        messages = Messages(self._signature, transport.rank, FLOAT32.accumulator, (len(words),), host)
        self._comm, self._label = Communicator(transport, host, messages, PLAIN), label

    @property
    def description(self) -> bytes:
        """The call signature that `Transport.begin` receives."""
        return replace(self._signature, label=self._label).pack()

    def _communicator(self) -> Communicator:
        return self._comm

    def _begin(self) -> None:
        self._comm.begin(self._label)

    def _exchange(self) -> SparseVector:
        self._received = self._exchange_words()
        return NO_ENTRIES

    def _finish(self, result: SparseVector) -> None:
        self.words = self._received

    def _exchange_words(self) -> list[int]:
        return [word for words in gather_words(self._comm, self.words, 0) for word in words]


class WordsComparison(WordsGather):
    """Compares each rank's words with those of rank 0.

    Attributes:
        words: the result has for each rank the position of its first word that differs, or the number of words.
    """

    name = "comparison of words"

    def _exchange_words(self) -> list[int]:
        expected = broadcast_words(self._comm, self.words, 0)
        pairs = enumerate(zip(self.words, expected, strict=True))
        first = next((i for i, (word, other) in pairs if word != other), len(expected))
        return [position for (position,) in gather_words(self._comm, [first], ROUNDS)]


class Realignment:
    """Makes all ranks give the next call the same number: the task of `sparsecomm.realign`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def run(self) -> SparseVector:
        self._transport.realign()
        return NO_ENTRIES

    def leave(self, error: BaseException) -> None:
        """Do nothing: other ranks do not wait for a call without a number."""
