"""The profile: what messages and work cost on this system, as `sparsecomm tune` measured it.

It is a small JSON file at ``SPARSECOMM_PROFILE``, or ``sparsecomm/profile.json`` in the user's folder for caches.
Without one that fits, links are measured when a communicator is set up (`sparsecomm.calls.measurement`), and the costs
of work are assumed. With ``SPARSECOMM_PROFILE=none`` neither happens: 1 Gb/s Ethernet is assumed between nodes, and
shared memory inside.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
import zlib
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import rate_text, time_text

__all__ = ["DEFAULT", "NONE", "KnownCosts", "Profile", "assumed", "measured", "path", "read", "used"]

SCHEMA = 1
NONE = "none"  # in place of a file: assume costs
_MAX_BYTES = 2**20  # one takes some hundred

# 1 Gb/s Ethernet between nodes; shared memory inside; a core of 2024.
DEFAULT = Costs(
    link=Link(alpha=100e-6, beta=8e-9, gap=5e-6),
    node=Link(alpha=3e-6, beta=0.25e-9, gap=2e-6),
    select=0.3e-9,
    merge=3e-9,
    codec=2.5e-9,
    add=0.4e-9,
    call=3e-6,
)


@dataclass(frozen=True)
class Profile:
    """Costs, and the system that they were measured on."""

    mpi: str
    ranks: int
    num_nodes: int
    costs: Costs

    def as_json(self) -> str:
        fields = asdict(self)
        fields["nodes"] = fields.pop("num_nodes")
        return json.dumps({"schema": SCHEMA, **fields}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that `as_json` wrote.

        Raises:
            InvalidInputError: it is no profile of this version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise InvalidInputError("it is of another version of sparsecomm")
            costs = fields["costs"]
            link = Link(**costs.pop("link"))
            node = costs.pop("node")
            made = Costs(link=link, node=None if node is None else Link(**node), **costs)
            numbers = [*asdict(made.link).values(), *asdict(made.node or link).values(), *costs.values()]
            if not all(type(v) in (int, float) and 0 <= v < 1e9 for v in numbers):
                raise InvalidInputError("a cost is not a number of seconds")
            return cls(str(fields["mpi"]), int(fields["ranks"]), int(fields["nodes"]), made)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"it cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class KnownCosts:
    """The costs that "auto" goes by, where they are from, and a checksum by which ranks compare them."""

    costs: Costs
    source: str
    checksum: int


def path() -> Path:
    """Return the file from which the profile is read, and to which it is written."""
    return _path(os.environ.get("SPARSECOMM_PROFILE"), os.environ.get("XDG_CACHE_HOME"))


def _path(told: str | None, caches: str | None) -> Path:
    file = Path(told) if told else Path(caches or "~/.cache") / "sparsecomm" / "profile.json"
    try:
        return file.expanduser()
    except RuntimeError:  # there is no home: nor will there be this file
        return file


def read(file: Path) -> Profile:
    """Return the profile in a file.

    Raises:
        InvalidInputError: there is none, or it cannot be used.
    """
    try:
        with open(file, "rb", opener=_at_once) as opened:
            regular = stat.S_ISREG(os.fstat(opened.fileno()).st_mode)
            data = opened.read(_MAX_BYTES + 1) if regular else b""
    except OSError as error:
        raise InvalidInputError(f"it cannot be read: {error.strerror}") from error
    if not regular or len(data) > _MAX_BYTES:
        raise InvalidInputError("it cannot be read: it is no regular file of at most 1 MiB")
    try:
        return Profile.from_json(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidInputError("it cannot be read: it is no text") from error


def _at_once(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)  # to open a FIFO waits otherwise


def used(mpi: str, ranks: int, num_nodes: int) -> KnownCosts | None:
    """Return the costs for so many ranks and nodes under this MPI; None if they are to be measured.

    A profile that cannot be used is warned of once.
    """
    return _used(os.environ.get("SPARSECOMM_PROFILE"), os.environ.get("XDG_CACHE_HOME"), mpi, ranks, num_nodes)


@cache
def _used(told: str | None, caches: str | None, mpi: str, ranks: int, num_nodes: int) -> KnownCosts | None:
    if told == NONE:
        return _with_checksum(DEFAULT, f"SPARSECOMM_PROFILE={NONE}, 1 Gb/s assumed")
    file = _path(told, caches)
    if told or os.path.exists(file):  # false, too, where nobody may look
        try:
            profile = read(file)
            for what, theirs, ours in (
                ("MPI", profile.mpi, mpi),
                ("ranks", profile.ranks, ranks),
                ("nodes", profile.num_nodes, num_nodes),
            ):
                if theirs != ours:
                    raise InvalidInputError(f"it is for {what} {theirs}, and this is {ours}")
        except InvalidInputError as error:
            warnings.warn(
                f"the profile {file} is not used: {error}. Links are measured in the first call instead; to measure "
                "all costs again: mpirun -n P python -m sparsecomm tune",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return _with_checksum(profile.costs, f"profile {file}")
    return _with_checksum(DEFAULT, "assumed: one rank sends no messages") if ranks == 1 else None


def assumed() -> KnownCosts:
    """Return the costs that are assumed where nothing was measured."""
    return _with_checksum(DEFAULT, "assumed: 1 Gb/s")


def measured(link: Link | None, node: Link | None) -> KnownCosts:
    """Return the costs with these links between nodes and inside; ``None``: there is none. The work's are assumed."""
    said = []
    for each, where in ((link, "between nodes"), (node, "inside")):
        if each is not None:
            said.append(f"{time_text(each.alpha)}, {rate_text(8 / each.beta)} {where}")
    costs = replace(DEFAULT, link=link or node or DEFAULT.link, node=node)
    return _with_checksum(costs, f"measured at set-up: {'; '.join(said)}")


def _with_checksum(costs: Costs, source: str) -> KnownCosts:
    # An interrupt within the repr of a dataclass makes it "..." for good.
    return KnownCosts(costs, source, zlib.crc32(repr(astuple(costs)).encode()) or 1)
