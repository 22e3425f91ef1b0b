"""The list of versions, and the cheapest way to the newest."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from sparsecomm.errors import PatchError
from sparsecomm.patches.versions import MANIFEST, File, Version, dump, parse, way


def cheapest(versions: list[Version], start: str, unusable: set[str]) -> tuple[int, int] | None:
    """Return the newest version that can be reached and the bytes, by trying all chains of files."""
    best: dict[str, int] = {}

    def visit(at: str, nbytes: int) -> None:
        if nbytes < best.get(at, 10**9):
            best[at] = nbytes
            for version in versions:
                for file, begin in ((version.patch, version.before), (version.anchor, at)):
                    if file is not None and begin == at and file.name not in unusable:
                        visit(version.weights, nbytes + file.nbytes)

    visit(start, 0)
    for i in reversed(range(len(versions))):
        if versions[i].weights in best:
            return i, best[versions[i].weights]
    return None


def test_the_way_is_the_cheapest_of_all() -> None:
    for seed in range(3000):
        rng = random.Random(seed)
        ids = [f"{i:032x}" for i in range(1, rng.choice([3, 5, 9]))]  # few: weights return
        versions, before = [], ""
        for number in range(rng.randrange(12)):
            after = rng.choice(ids)
            patch = File(f"p{number}", rng.randrange(1, 50)) if before and rng.random() < 0.8 else None
            anchor = File(f"a{number}", rng.randrange(30, 99)) if rng.random() < 0.3 else None
            versions.append(Version(number, number, after, before if patch else "", patch, anchor))
            before = after
        unusable = {file.name for v in versions for file in (v.patch, v.anchor) if file and rng.random() < 0.1}
        start = rng.choice(["", "f" * 32, *ids])
        reached, links = way(versions, start, unusable)
        expected = cheapest(versions, start, unusable)
        assert (reached is None) == (expected is None)
        if reached is not None and expected is not None:
            assert reached == versions[expected[0]]
            assert sum(link.file.nbytes for link in links) == expected[1]
            at = start
            for link in links:
                assert link.file.name not in unusable
                assert link.is_anchor or link.version.before == at
                at = link.version.weights
            assert at == reached.weights


@pytest.mark.parametrize("backward", [False, True])
def test_long_lists_take_little_time_and_memory(backward: bool) -> None:
    ids = [f"{i:032x}" for i in range(50_000)]
    chain = [Version(i, i, ids[i], ids[i - 1], File(f"p{i}", 1)) for i in range(1, len(ids))]
    begin = time.process_time()
    reached, links = way(chain[::-1] if backward else chain, ids[0], set())
    assert reached is not None
    assert len(links) == (1 if backward else len(chain))
    assert time.process_time() - begin < 10


NAMES = (
    "../x.patch", "/x.patch", "a/b.patch", ".hidden", "", "..", "x\\y", "x..y", "x\n", "x" * 300, "\u0661.patch", 7,
    None,
)  # fmt: skip
ROWS: list[Any] = [
    *([1, 1, "0" * 32, "", [name, 5], None] for name in NAMES),
    *([1, 1, "0" * 32, "", None, ["x.safetensors.gz", size]] for size in (-1, 1.5, "5", True, 1 << 70, None)),
    *([number, 1, "0" * 32, "", None, None] for number in (-1, 1.0, True, None, 1 << 70)),
    *([1, 1, weights, "", None, None] for weights in ("", "0" * 31, "0" * 31 + "g", 5, None, "0" * 33)),
    [1, 1, "0" * 32, 5, None, None],
    [1, 1, "0" * 32, "", "xy", None],
    [1, 1, "0" * 32],
    5,
    {},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row)[:60])
def test_a_list_with_an_invalid_version_is_refused(row: Any) -> None:
    with pytest.raises(PatchError, match=MANIFEST):
        parse(json.dumps({"format": "sparsecomm versions 1", "versions": [row]}).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"format": "sparsecomm versions 2", "versions": []}', b"5",
     b'{"format": "sparsecomm versions 1", "versions": 5}', b'{"format": "sparsecomm versions 1"}', b"9" * 5000],
    ids=lambda data: repr(data)[:40],
)  # fmt: skip
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(PatchError, match=MANIFEST):
        parse(data)


def test_lists_of_versions_round_trip() -> None:
    versions = [
        Version(1, 7, "0" * 32, "", None, File("a.safetensors.gz", 9)),
        Version(2, 0, "1" * 32, "0" * 32, File("b.patch", 0), None),
        Version(5, 1 << 62, "1" * 32, "", None, None),
    ]
    assert parse(dump(versions)) == versions
    assert parse(dump([])) == []
    with pytest.raises(PatchError, match="do not increase"):
        parse(dump([versions[1], versions[0]]))
