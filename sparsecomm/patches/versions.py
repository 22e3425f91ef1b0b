"""The list of versions in a folder (`Version`), and the cheapest way to the newest one (`way`)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import Any, NamedTuple

from sparsecomm.checks import quote, to_int
from sparsecomm.errors import PatchError

MANIFEST = "versions.json"  # the file that lists the versions
MAX_MANIFEST_BYTES = 1 << 24
_FORMAT = "sparsecomm versions 1"
_NAME = re.compile(r"[0-9A-Za-z_-]{1,100}(\.[0-9A-Za-z_-]{1,20}){0,5}")  # no paths out of the folder, no hidden files
_ID = re.compile(r"[0-9a-f]{32}")


class File(NamedTuple):
    """A file of a version."""

    name: str
    nbytes: int


class Version(NamedTuple):
    """A published version.

    Attributes:
        number: increases from version to version.
        step: as passed to `publish`.
        weights: identifies the weights: see `sparsecomm.patches.codec.version_of`.
        before: the weights to which the patch applies; "" without a patch.
        patch, anchor: the files that lead to it; both ``None`` if the weights equal the previous version's.
    """

    number: int
    step: int
    weights: str
    before: str = ""
    patch: File | None = None
    anchor: File | None = None


class Link(NamedTuple):
    """A file that leads to a version."""

    version: Version
    file: File
    is_anchor: bool


def dump(versions: Sequence[Version]) -> bytes:
    """Return the manifest."""
    lines = ",\n".join(json.dumps(version) for version in versions)
    return f'{{"format": "{_FORMAT}", "versions": [\n{lines}\n]}}\n'.encode()


def parse(data: bytes) -> list[Version]:
    """Return the versions in a manifest, oldest first. Raise `PatchError` if it is damaged."""
    try:
        manifest = json.loads(data)
        if manifest["format"] != _FORMAT:
            raise ValueError(f"its format is {quote(manifest['format'])}; expected {_FORMAT!r}")
        versions = [_version(*fields) for fields in manifest["versions"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PatchError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if any(later.number <= earlier.number for earlier, later in pairwise(versions)):
        raise PatchError(f"{MANIFEST} cannot be read: the numbers of versions do not increase")
    return versions


def _version(number: object, step: object, weights: str, before: str, patch: object, anchor: object) -> Version:
    numbers = to_int(number), to_int(step)
    if None in numbers or not _ID.fullmatch(weights) or (before and not _ID.fullmatch(before)):
        raise ValueError(f"version {quote(number)} of step {quote(step)} is invalid")
    return Version(*numbers, weights, before, _file(patch), _file(anchor))  # type: ignore[arg-type]


def _file(fields: Any) -> File | None:
    if fields is None:
        return None
    name, nbytes = fields
    if not _NAME.fullmatch(name) or (size := to_int(nbytes)) is None:
        raise ValueError(f"{quote(fields)} is not a file's name and size")
    return File(name, size)


def way(versions: Sequence[Version], weights: str, unusable: Collection[str]) -> tuple[Version | None, list[Link]]:
    """Return the newest version that can be reached, and the files that lead there with the fewest bytes.

    Args:
        versions: oldest first.
        weights: the version from which to begin.
        unusable: names of files that must not be used.
    """
    links: defaultdict[str, list[Link]] = defaultdict(list)  # by the weights to which they apply: "" for anchors
    for version in versions:
        for file, before, is_anchor in ((version.patch, version.before, False), (version.anchor, "", True)):
            if file is not None and file.name not in unusable:
                links[before].append(Link(version, file, is_anchor))
    # Dijkstra's algorithm. Weights may return to those of an earlier version, so a way need not follow the versions.
    number = count()
    queue: list[tuple[int, int, str, Link | None]] = [(0, next(number), weights, None), (0, next(number), "", None)]
    last: dict[str, Link | None] = {}  # the file that leads to weights
    while queue:
        nbytes, _, at, link = heappop(queue)
        if at not in last:
            last[at] = link
            for more in links[at]:
                heappush(queue, (nbytes + more.file.nbytes, next(number), more.version.weights, more))
    reached = next((version for version in reversed(versions) if version.weights in last), None)
    links_back: list[Link] = []  # the last one first
    link = last[reached.weights] if reached is not None else None
    while link is not None:
        links_back.append(link)
        link = last["" if link.is_anchor else link.version.before]
    return reached, links_back[::-1]
