"""The comparison of `check_weights`, over words that a test chooses."""

from __future__ import annotations

from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.states.weights import WeightComparison
from sparsecomm.transport import Transport

__all__ = ["WordsComparison"]


class WordsComparison(WeightComparison):
    """Replaces ``words`` with, for each rank, the position of the first word that differs from rank 0's."""

    def __init__(self, transport: Transport, words: list[int], label: Label) -> None:
        WordsGather.__init__(self, transport, words, label)
