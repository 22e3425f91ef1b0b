"""`Nodes`: groups of ranks that reach each other fast. Each group counts as one rank in sparse sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from sparsecomm.calls.collectives import gather_by_rank
from sparsecomm.calls.label import Label
from sparsecomm.checks import ARGUMENT_ERRORS, quote
from sparsecomm.errors import InvalidInputError, log
from sparsecomm.transport import Comm, DenseCollectives, Transport, existing_transport, members_of

NodesOption: TypeAlias = 'Literal["auto", False] | Comm'


class Nodes(NamedTuple):
    """Several nodes with the same number of ranks, at least 2 each, as seen from one rank.

    Attributes:
        ranks: the ranks of each node. Ranks at the same position in their nodes have the same slice.
        rank: this rank.
        collectives: those inside this rank's node, by kind of device. Devices without an entry use messages.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    collectives: Mapping[str, DenseCollectives] = {}

    @property
    def per_node(self) -> int:
        return len(self.ranks[0])

    def place(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's node, and the rank's position in it."""
        return next((i, ranks.index(rank)) for i, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def position(self) -> int:
        """The position of this rank in its node."""
        return self.place(self.rank)[1]

    @property
    def inside(self) -> Sequence[int]:
        """The ranks of this rank's node."""
        return self.ranks[self.place(self.rank)[0]]

    @property
    def between(self) -> Sequence[int]:
        """The ranks that have the same slice as this rank, one of each node."""
        return list(zip(*self.ranks, strict=True))[self.position]

    def __str__(self) -> str:
        return f"{len(self.ranks)} of {self.per_node} ranks"


def check_nodes(nodes: NodesOption) -> NodesOption:
    """Check the option ``nodes`` of a `Reducer`, and return it."""
    with suppress(*ARGUMENT_ERRORS):  # InvalidInputError too
        if nodes is False or (isinstance(nodes, str) and nodes == "auto"):
            return nodes
        if nodes is not None and not isinstance(nodes, (str, int, float)):
            existing_transport(nodes)  # raises if it is no communicator
            return nodes
    raise InvalidInputError(
        f"nodes={quote(nodes)}: expected 'auto', False, or a process group or mpi4py communicator of the ranks "
        "that this rank reaches fast, including itself"
    )


def find_nodes(transport: Transport, option: NodesOption, devices: Collection[str] = ()) -> tuple[Nodes | None, str]:
    """Return the nodes that ``option`` means, and a description for reports. Collective.

    ``devices``: the kinds of devices that hold this rank's tensors. A kind has collectives if all ranks of the node
    have tensors on it, because collectives would wait forever for a rank without any. The nodes are ``None`` if every
    rank counts as a node: with ``option=False``, one node, one rank per node, or different numbers of ranks.
    """
    if option is False or transport.size == 1:
        return None, ""
    numbers = transport.node_of_rank if isinstance(option, str) else _groups(transport, option)
    ranks = tuple(tuple(r for r in range(transport.size) if numbers[r] == n) for n in dict.fromkeys(numbers))
    counts = sorted({len(members) for members in ranks})
    if len(ranks) == 1:
        return None, f"one, of {transport.size} ranks, which exchange sparsely as if each were a node"
    if len(counts) > 1:
        note = f"{len(ranks)} of {counts[0]} to {counts[-1]} ranks; as their sizes differ, every rank counts as a node"
        if transport.rank == 0:
            _warn_once(f"nodes: {note}. Start as many ranks on each machine, or pass groups of equal size as nodes=")
        return None, note
    if counts == [1]:
        return None, ""
    nodes = Nodes(ranks, transport.rank)
    kinds = [kind for kind in ("cpu", "cuda") if devices and transport.has_collectives(kind)]
    if kinds:
        words = [int(kind in devices) for kind in kinds]
        by_rank = gather_by_rank(transport, words, Label.of(("call", "comparison of devices")))
        shared = [kind for i, kind in enumerate(kinds) if all(by_rank[rank][i] for rank in nodes.inside)]
        nodes = nodes._replace(collectives={kind: transport.collectives(nodes.inside, kind) for kind in shared})
    return nodes, f"{nodes}, summed densely inside"


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _groups(transport: Transport, comm: Comm) -> list[int]:
    """Return, for each rank, the first rank of the group that it passed. This rank passed ``comm``. Collective."""
    own, size = members_of(comm), transport.size
    members = [rank for rank, number in enumerate(transport.members) if number in own]
    words = [members[0], len(members)] if transport.rank in members else [size, 0]
    by_rank = gather_by_rank(transport, words, Label.of(("call", "comparison of nodes")))
    firsts, counts = map(list, zip(*by_rank, strict=True))
    if size in firsts or [Counter(firsts)[first] for first in firsts] != counts:
        raise InvalidInputError(
            f"rank {transport.rank}: nodes: the groups passed overlap or leave out ranks: by rank, they begin with "
            f"ranks {firsts} and have {counts} ranks; pass on each rank a group that contains it and is not destroyed"
        )
    return firsts
