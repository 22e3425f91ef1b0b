"""`sparsecomm tune`: its profile, its checks and its output."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from sparsecomm.tuning import profile
from tests.cli.test_cli import shell
from tests.thinning import exhaustive

QUICK = ("--seconds", "0.05")

# Ranks of one machine that are said to be on several nodes. Rank 1 does not see the file of rank 0.
NODES = """
import sys
from mpi4py import MPI
from sparsecomm import transport
from sparsecomm.cli import main, tune
of = transport.transport_of

def of_nodes(comm):
    ranks = of(comm)
    ranks.node_of_rank, ranks.num_nodes = {nodes}, len(set({nodes}))
    return ranks

transport.transport_of = of_nodes
if MPI.COMM_WORLD.rank == 1:
    tune._sees = lambda measured, file: False
sys.exit(main(["tune", *sys.argv[1:]]))
"""


def costs_of(tuned: profile.Profile) -> list[float]:
    costs = asdict(tuned.costs)
    links = [link for link in (costs.pop("link"), costs.pop("node")) if link is not None]
    return [*costs.values(), *(cost for link in links for cost in link.values())]


# -- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, exhaustive(3)])
def test_writes_the_profile_that_is_used(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    file.write_text("an old one")
    program = "import sys, sparsecomm as sc\nfrom sparsecomm.cli import main\n"
    program += f"assert not main(['tune', *{QUICK}])\nprint('source', sc.explain(10**6, 0.001).source)"
    ran = shell("-W", "error", "-c", program, ranks=ranks, SPARSECOMM_PROFILE=str(file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tuned = profile.read(file)
    assert (tuned.ranks, tuned.num_nodes) == (ranks, 1)
    assert tuned.costs.node == tuned.costs.link
    assert all(0 < cost < 1 and math.isfinite(cost) for cost in costs_of(tuned))
    assert list(file.parent.iterdir()) == [file]
    assert ran.stdout.count(f"source profile {file}") == ranks

    assert f"on {ranks} ranks of 1 node, {tuned.mpi}" in ran.stdout
    assert "as inside: there is only one node" in ran.stdout
    assert ran.stdout.count("auto for n=") == 4
    assert ran.stdout.count(f"The profile is in {file}") == 1
    assert "Train with" not in ran.stdout
    assert "do not see it" not in ran.stdout


@pytest.mark.parametrize(("nodes", "inside"), [([0, 0, 1], True), exhaustive([0, 1], False)])
def test_several_nodes(nodes: list[int], inside: bool, tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "profile.json"
    ran = shell("-c", NODES.format(nodes=nodes), "--output", str(file), *QUICK, ranks=len(nodes))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tuned = profile.read(file)
    assert (tuned.ranks, tuned.num_nodes) == (len(nodes), 2)
    assert (tuned.costs.node is not None) is inside
    assert tuned.costs.node != tuned.costs.link
    assert all(0 < cost < 1 for cost in costs_of(tuned))
    assert f"on {len(nodes)} ranks of 2 nodes" in ran.stdout
    assert ("each rank has a node of its own" in ran.stdout) is not inside
    assert f"Train with SPARSECOMM_PROFILE={file}" in ran.stdout
    assert "Ranks that do not see it there: 1. Copy it to their nodes." in ran.stdout


# -- checks -----------------------------------------------------------------------------------------------------------


def test_refused_once_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    refused = {
        ("--output", f"{tmp_path}/a file/folder/profile.json"): "cannot be written",
        ("--output", f"{tmp_path}"): "cannot be written: Is a directory",
        ("--output", "/dev/null"): "is not a regular file",
    }
    program = "import sys\nfrom mpi4py import MPI\nfrom sparsecomm.cli import main\n"
    program += f"found = [main(['tune', *options]) for options in {list(refused)}]\nMPI.COMM_WORLD.Barrier()\n"
    ran = shell("-c", program + f"sys.exit(found != [1] * {len(refused)})", ranks=2)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if line.startswith("sparsecomm: ")]
    assert len(said) == len(refused)
    assert all(expected in line for expected, line in zip(refused.values(), said, strict=True)), said
    assert "Traceback" not in ran.stderr
    assert ran.stdout.strip() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["a file"]
