"""Which ranks are on one machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm.transport import nodes as node_ids


@given(st.lists(st.binary(min_size=1, max_size=1), max_size=12))
def test_equal_marks_are_one_machine_and_numbers_count_up(marks: list[bytes]) -> None:
    numbers = node_ids.numbered(marks)
    assert [[a == b for b in marks] for a in marks] == [[a == b for b in numbers] for a in numbers]
    assert list(dict.fromkeys(numbers)) == list(range(len(set(marks))))


def test_a_mark_is_that_of_a_machine_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = node_ids.mark()
    assert mine == node_ids.mark()
    assert len(mine) == node_ids.MARK

    def unreadable(path: Path) -> str:
        raise FileNotFoundError(path)

    marks = {mine}
    for text in (lambda path: "one start", lambda path: "another", unreadable):
        monkeypatch.setattr(Path, "read_text", text)
        for host in ("a", "b"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            marks.add(node_ids.mark())
    assert len(marks) == 7
