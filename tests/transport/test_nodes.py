"""Which ranks run on one node."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm.transport.nodes import NODE_ID_BYTES, node_id, number_nodes


@given(st.lists(st.binary(min_size=1, max_size=1), max_size=12))
def test_equal_ids_are_one_node_and_numbers_count_up(ids: list[bytes]) -> None:
    numbers = number_nodes(ids)
    assert [[a == b for b in ids] for a in ids] == [[a == b for b in numbers] for a in numbers]
    assert list(dict.fromkeys(numbers)) == list(range(len(set(ids))))


def test_an_id_is_that_of_a_node_since_it_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = node_id()
    assert mine == node_id()
    assert len(mine) == NODE_ID_BYTES

    def unreadable(path: Path) -> str:
        raise FileNotFoundError(path)

    ids = {mine}
    for text in (lambda path: "one start", lambda path: "another", unreadable):
        monkeypatch.setattr(Path, "read_text", text)
        for host in ("a", "b"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            ids.add(node_id())
    assert len(ids) == 7
