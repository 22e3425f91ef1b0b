"""A collective call after which all ranks have the words of all."""

from __future__ import annotations

from sparsecomm.calls.collective import WordsBroadcast
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.gather import gather_words

__all__ = ["WordsGather"]


class WordsGather(WordsBroadcast):
    """As `WordsBroadcast`, but ``words`` are those of all ranks in the end, one rank's after the other's."""

    name = "words of all ranks"

    def _exchange(self, comm: Communicator) -> list[int]:
        return [word for words in gather_words(comm, self.words, 0) for word in words]
