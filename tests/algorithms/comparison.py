"""The comparison of words that `check_weights` makes, with any words."""

from __future__ import annotations

from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.states.weights import WeightComparison
from sparsecomm.transport import Transport

__all__ = ["WordsComparison"]


class WordsComparison(WeightComparison):
    """Its ``words`` become the position of the first difference from rank 0 on each rank."""

    def __init__(self, transport: Transport, words: list[int], label: Label) -> None:
        WordsGather.__init__(self, transport, words, label)
