"""The profile: costs of messages and work on this system, as `sparsecomm tune` measured them.

A profile is a small JSON file at ``SPARSECOMM_PROFILE``, or ``sparsecomm/profile.json`` in the user's cache folder.
Without a profile for these ranks, `sparsecomm.calls.measurement` measures the links when a communicator is set up, and
the costs of work are assumed. ``SPARSECOMM_PROFILE=none`` turns both off: the library assumes 1 Gb/s Ethernet between
nodes and shared memory inside them.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import rate_text, time_text

SCHEMA = 1
NONE = "none"  # instead of a file name: assume costs
_MAX_BYTES = 2**20  # a profile takes a few hundred

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
    """Costs, and the system on which they were measured."""

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
        """Parse the output of `as_json`; raise `InvalidInputError` if it is not a profile of this version."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise InvalidInputError("it was written by another version of sparsecomm")
            costs = fields["costs"]
            link, node = Link(**costs.pop("link")), costs.pop("node")
            parsed = Costs(link=link, node=None if node is None else Link(**node), **costs)
            seconds = [*asdict(link).values(), *asdict(parsed.node or link).values(), *costs.values()]
            if not all(type(value) in (int, float) and 0 <= value < 1e9 for value in seconds):
                raise InvalidInputError("a cost is not a number of seconds")
            return cls(str(fields["mpi"]), int(fields["ranks"]), int(fields["nodes"]), parsed)
        except InvalidInputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"it cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class KnownCosts:
    """The costs with which "auto" chooses, and their source."""

    costs: Costs
    source: str

    @cached_property
    def checksum(self) -> int:
        """A checksum of the costs, not 0, for comparing them between ranks."""
        # Use a tuple: if an interrupt ends the repr of a dataclass, all later calls of it return "...".
        return zlib.crc32(repr(astuple(self.costs)).encode()) or 1


ASSUMED = KnownCosts(DEFAULT, "assumed: 1 Gb/s")  # if nothing was measured


def path() -> Path:
    """Return the file from which the profile is read, and to which it is written."""
    setting, caches = os.environ.get("SPARSECOMM_PROFILE"), os.environ.get("XDG_CACHE_HOME")
    file = Path(setting) if setting else Path(caches or "~/.cache") / "sparsecomm" / "profile.json"
    try:
        return file.expanduser()
    except RuntimeError:  # there is no home folder
        return file


def read(file: Path) -> Profile:
    """Read a profile; raise `InvalidInputError` if ``file`` does not exist or is not a valid profile."""
    try:
        if file.stat().st_size > _MAX_BYTES or not file.is_file():  # opening a FIFO would block
            raise InvalidInputError("it cannot be read: it is not a regular file of at most 1 MiB")
        return Profile.from_json(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidInputError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError("it cannot be read: it is not text") from error


def costs_for(mpi: str, ranks: int, num_nodes: int) -> KnownCosts | None:
    """Return the costs for this MPI and these numbers of ranks and nodes; ``None`` if they must be measured.

    Warns once about a profile that cannot be used.
    """
    return _costs_for(os.environ.get("SPARSECOMM_PROFILE"), path(), mpi, ranks, num_nodes)


@cache
def _costs_for(setting: str | None, file: Path, mpi: str, ranks: int, num_nodes: int) -> KnownCosts | None:
    if setting == NONE:
        return KnownCosts(DEFAULT, f"SPARSECOMM_PROFILE={NONE}, 1 Gb/s assumed")
    if setting or os.path.exists(file):  # false if the folder is not accessible
        try:
            profile = read(file)
            for name, expected, actual in (
                ("MPI", profile.mpi, mpi),
                ("ranks", profile.ranks, ranks),
                ("nodes", profile.num_nodes, num_nodes),
            ):
                if expected != actual:
                    raise InvalidInputError(f"it is for {name} {expected}, and this is {actual}")
        except InvalidInputError as error:
            warnings.warn(
                f"the profile {file} is not used: {error}. Links are measured in the first call instead; to measure "
                "all costs again: mpirun -n P python -m sparsecomm tune",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return KnownCosts(profile.costs, f"profile {file}")
    return KnownCosts(DEFAULT, "assumed: one rank sends no messages") if ranks == 1 else None


def measured(link: Link | None, node: Link | None) -> KnownCosts:
    """Return the costs for these links between and inside nodes, with assumed costs of work."""
    texts = [
        f"{time_text(costs.alpha)}, {rate_text(8 / costs.beta)} {where}"
        for costs, where in ((link, "between nodes"), (node, "inside"))
        if costs is not None
    ]
    costs = replace(DEFAULT, link=link or node or DEFAULT.link, node=node)
    return KnownCosts(costs, f"measured at set-up: {'; '.join(texts)}")
