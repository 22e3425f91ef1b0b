"""The options of `sparsecomm model`, parsed and checked before anything is run."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from sparsecomm.algorithms import ALGORITHMS, find
from sparsecomm.cli.outputs import PLOTS, json_and_plot
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import count, rate, seconds
from sparsecomm.tuning import profile
from sparsecomm.wire import WIRES

__all__ = ["Asked", "add_arguments", "node_ranks", "parse"]

_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Asked:
    """The parsed options.

    Attributes:
        ranks: the numbers of ranks, increasing.
        per_node: ranks per node.
        costs: the costs of messages and work.
        source: the origin of the costs, for the table.
        n, k: elements, and entries that each rank selects.
        algorithms, wire: names, also "auto".
        straggler: seconds by which the last rank begins late.
        shared: the part of a rank's entries that all ranks select.
        seed: the seed of the entries.
        everything: also simulate what takes long.
        json, plot: files to write.
    """

    ranks: tuple[int, ...]
    per_node: int
    costs: Costs
    source: str
    n: int
    k: int
    algorithms: tuple[str, ...]
    wire: str
    straggler: float
    shared: float
    seed: int
    everything: bool
    json: Path | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    network = parser.add_argument_group("the network")
    network.add_argument(
        "--ranks",
        default="2:256",
        metavar="LIST",
        help="how many: A:B doubles from A to B; or a list with commas (%(default)s)",
    )
    network.add_argument("--rate", metavar="RATE", help="of a node's link: 1gbit, 100mbit (that of the profile)")
    network.add_argument("--latency", metavar="TIME", help="per message: 100us (that of the profile)")
    network.add_argument("--ranks-per-node", default="1", metavar="M", help="ranks per node (%(default)s)")
    network.add_argument("--node-rate", metavar="RATE", help="inside a node (that of the profile)")
    network.add_argument("--node-latency", metavar="TIME", help="inside a node (that of the profile)")
    network.add_argument(
        "--straggler", default="0s", metavar="TIME", help="how much later the last rank begins (%(default)s)"
    )
    network.add_argument(
        "--profile", metavar="FILE", help="costs as `sparsecomm tune` writes them (1 Gb/s and 100 us, a core of 2024)"
    )
    problem = parser.add_argument_group("the problem")
    problem.add_argument(
        "--n", default="25.6M", metavar="N", help="elements: K, M and G are decimal, Ki, Mi and Gi binary (%(default)s)"
    )
    problem.add_argument("--density", default="0.001", help="k/n (%(default)s)")
    problem.add_argument(
        "--shared",
        default="0.5",
        metavar="PART",
        help="the part of a rank's entries that all ranks select (%(default)s)",
    )
    problem.add_argument(
        "--algorithms",
        default="dense,allgather,tree,butterfly,split,auto",
        metavar="LIST",
        help=f"some of auto, {', '.join(ALGORITHMS)} (%(default)s)",
    )
    problem.add_argument("--wire", default="auto", help=f"one of auto, {', '.join(WIRES)} (%(default)s)")
    problem.add_argument("--seed", default="0", help="of the gradients (%(default)s)")
    problem.add_argument("--all", action="store_true", help="simulate everything, however long it takes")
    output = parser.add_argument_group("output, besides the table")
    output.add_argument("--json", metavar="FILE", help="write the figures to this file as well")
    output.add_argument("--plot", metavar="FILE", help=f"draw time, bytes, messages against ranks: {', '.join(PLOTS)}")


def parse(arguments: argparse.Namespace) -> Asked:
    """Return the options of `add_arguments`, checked.

    Raises:
        InvalidInputError: one of them cannot be used.
    """
    n, density = count("--n", arguments.n), _part("--density", arguments.density)
    if not density:
        raise InvalidInputError(f"--density {arguments.density}: expected a number above 0 and up to 1")
    names = tuple(dict.fromkeys(name.strip() for name in arguments.algorithms.split(",")))
    try:
        for name in names:
            find(name)
    except InvalidInputError as error:
        raise InvalidInputError(f"--algorithms {arguments.algorithms}: {error}") from error
    if arguments.wire != "auto" and arguments.wire not in WIRES:
        raise InvalidInputError(f"--wire {arguments.wire}: expected one of auto, {', '.join(WIRES)}")
    json, plot = json_and_plot(arguments)
    costs, source = _costs(arguments)
    return Asked(
        ranks=_ranks(arguments.ranks),
        per_node=_whole("--ranks-per-node", arguments.ranks_per_node, 1),
        costs=costs,
        source=source,
        n=n,
        k=min(n, max(1, round(density * n))),
        algorithms=names,
        wire=arguments.wire,
        straggler=seconds("--straggler", arguments.straggler),
        shared=_part("--shared", arguments.shared),
        seed=_whole("--seed", arguments.seed, 0),
        everything=arguments.all,
        json=json,
        plot=plot,
    )


def node_ranks(asked: Asked, P: int) -> list[int]:
    """Return the number of the node of each of P ranks."""
    return [rank // asked.per_node for rank in range(P)]


def _ranks(text: str) -> tuple[int, ...]:
    expected = "expected A:B, from 1 on, with A at most B, or a list such as 2,3,8"
    try:
        first, colon, last = text.partition(":")
        found = [int(first), int(last)] if colon else sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise InvalidInputError(f"--ranks {text}: {expected}") from error
    if colon and found[0] > found[1]:
        raise InvalidInputError(f"--ranks {text}: no number is in this range; {expected}")
    if found[0] < 1 or found[-1] > _MAX_RANKS:
        raise InvalidInputError(f"--ranks {text}: {expected}, and at most {_MAX_RANKS} ranks")
    if colon:
        found = [found[0] << j for j in range((found[1] // found[0]).bit_length())]
    return tuple(found)


def _whole(option: str, text: str, min_value: int) -> int:
    try:
        found = int(text)
    except ValueError:
        found = min_value - 1
    if found < min_value:
        raise InvalidInputError(f"{option} {text}: expected a whole number, at least {min_value}")
    return found


def _part(option: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        raise InvalidInputError(f"{option} {text}: expected a number from 0 to 1")
    return found


def _costs(arguments: argparse.Namespace) -> tuple[Costs, str]:
    """Return the costs, those that options give in place of the profile's or the default ones, and their origin."""
    costs, source = profile.DEFAULT, "assumed"
    if arguments.profile is not None:
        try:
            costs, source = profile.read(Path(arguments.profile)).costs, f"profile {arguments.profile}"
        except InvalidInputError as error:
            raise InvalidInputError(f"--profile {arguments.profile}: {error}") from error
    link, node = costs.link, costs.node or costs.link
    if arguments.rate is not None:
        link = replace(link, beta=8 / rate("--rate", arguments.rate))
    if arguments.latency is not None:
        link = replace(link, alpha=seconds("--latency", arguments.latency))
    if arguments.node_rate is not None:
        node = replace(node, beta=8 / rate("--node-rate", arguments.node_rate))
    if arguments.node_latency is not None:
        node = replace(node, alpha=seconds("--node-latency", arguments.node_latency))
    return replace(costs, link=_link(link), node=_link(node)), source


def _link(link: Link) -> Link:
    return Link(float(link.alpha), float(link.beta))
