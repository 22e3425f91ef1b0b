"""Prefixes of messages over gloo: what is none is refused, whatever its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("torch.distributed")

from sparsecomm.transport.process_group.gloo import DATA, GOODBYE, SENT, _memory_for, _message, parse_prefix

word = st.one_of(st.integers(-6, 300), st.sampled_from([2**17, 2**17 + 1, 2**62]), st.integers(-(2**63), 2**63 - 1))


@given(st.one_of(st.binary(min_size=32, max_size=40), st.lists(word, min_size=4, max_size=4)))
@example([SENT, 1, 0, 0])
@example([DATA, 1, 2**17 + 1, 0])
@example([DATA, 1, 2**32, -1])
@example([DATA, 1, -5, 0])
@example([DATA, 1, 2**62, 4])
@example([17, 1, 900, 4])
def test_random_bytes_are_refused_or_read_in_bounds(words: bytes | list[int]) -> None:
    data = np.frombuffer(words, np.uint8) if isinstance(words, bytes) else np.array(words, np.int64).view(np.uint8)
    try:
        kind, number, nbytes, piece = parse_prefix(data)
    except ValueError:
        return
    assert kind in (DATA, GOODBYE, *range(256))
    assert 0 <= number < 2**62
    assert 0 <= nbytes <= 2**17 if piece == 0 else kind == DATA and nbytes > 0 < piece


@pytest.mark.parametrize("data", [b"", b"abc", bytes(1000)])
def test_a_message_begins_with_its_prefix(data: bytes) -> None:
    message = _message(DATA, 7, np.frombuffer(data, np.uint8))
    assert parse_prefix(message) == (DATA, 7, len(data), 0)
    assert message[32:].tobytes() == data


def test_a_message_for_which_there_is_no_memory() -> None:
    with pytest.raises(ValueError, match="more than there is memory for"):
        _memory_for(2**62)
