"""Small collective calls by which ranks compare what they hold, in the order of the call queue."""

from __future__ import annotations

from sparsecomm.calls.collective import WordsBroadcast
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.gather import ROUNDS, broadcast_words, gather_words

__all__ = ["WordsComparison", "WordsGather"]


class WordsGather(WordsBroadcast):
    """A collective call after which ``words`` are those of all ranks, in order of rank."""

    name = "words of all ranks"

    def _exchange(self, comm: Communicator) -> list[int]:
        return [word for words in gather_words(comm, self.words, 0) for word in words]


class WordsComparison(WordsBroadcast):
    """A collective call after which all ranks know where each rank's words differ from those of rank 0.

    Rank 0 sends its words, at most 8 bytes each, and each rank a position.

    Attributes:
        words: afterwards, for each rank, the position of its first word that differs; or the number of words if none
            does.
    """

    name = "comparison of words"

    def _exchange(self, comm: Communicator) -> list[int]:
        theirs = broadcast_words(comm, self.words, 0)
        first = next((i for i, (a, b) in enumerate(zip(self.words, theirs, strict=True)) if a != b), len(theirs))
        return [word for (word,) in gather_words(comm, [first], ROUNDS)]
