"""The table of wire formats: what the docs say of it, and what ranks of different versions rely on."""

from __future__ import annotations

import re
from pathlib import Path

from sparsecomm.wire import WIRES

DOCS = Path(__file__).parents[2] / "docs" / "internals" / "wires.md"


def test_the_docs_name_all_formats() -> None:
    assert set(WIRES) <= set(re.findall(r'`"?(\w+)"?`', DOCS.read_text()))


def test_codes_stay() -> None:
    """They are in messages: a rank of an earlier version would take another format for its own."""
    codes = {"plain": 0, "packed": 1, "packed_bfloat16": 2, "packed_float16": 3, "packed_int8": 5}
    assert {name: wire.code for name, wire in WIRES.items()}.items() >= codes.items()
    assert len({wire.code for wire in WIRES.values()} | {4}) == len(WIRES) + 1  # 4 was int8 without infinities
