"""`sparsecomm tune`: what it writes, what it refuses, and whether the figures are of what they say."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from sparsecomm.cli import main, tune
from sparsecomm.primitives.costs import Link
from sparsecomm.tuning import profile
from tests.cli.test_cli import shell
from tests.processes import needs_mpirun
from tests.thinning import exhaustive

QUICK = ("--seconds", "0.05")
SIZES = [64 << 2 * step for step in range(9)]

# Ranks of one node that take it for several.
NODES = """
import sys
from sparsecomm import transport
from sparsecomm.cli import main
of = transport.of

def of_nodes(comm):
    ranks = of(comm)
    ranks.node_of_rank, ranks.num_nodes = {nodes}, len(set({nodes}))
    return ranks

transport.of = of_nodes
sys.exit(main(["tune", *sys.argv[1:]]))
"""


def costs_of(made: profile.Profile) -> list[float]:
    costs = asdict(made.costs)
    links = [link for link in (costs.pop("link"), costs.pop("node")) if link is not None]
    return [*costs.values(), *(cost for link in links for cost in link.values())]


# -- what it writes ---------------------------------------------------------------------------------------------------


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, exhaustive(3)])
def test_writes_the_profile_that_is_used(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a folder" / "profile.json"
    ran = shell("-m", "sparsecomm", "tune", "--output", str(file), *QUICK, ranks=ranks)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = profile.read(file)
    assert (made.ranks, made.num_nodes) == (ranks, 1)
    assert made.costs.node == made.costs.link
    assert all(0 < cost < 1 and math.isfinite(cost) for cost in costs_of(made))
    assert list(file.parent.iterdir()) == [file]

    monkeypatch.setenv("SPARSECOMM_PROFILE", str(file))
    used = profile.used(made.mpi, ranks, 1)
    assert (used.costs, used.source) == (made.costs, f"profile {file}")

    assert f"on {ranks} ranks of 1 node, {made.mpi}" in ran.stdout
    assert "as inside: there is only one node" in ran.stdout
    assert ran.stdout.count("auto for n=") == 4
    assert ran.stdout.count(f"The profile is in {file}") == 1
    assert f"Train with SPARSECOMM_PROFILE={file}" in ran.stdout
    assert "do not see it" not in ran.stdout


@needs_mpirun
@pytest.mark.mpi
def test_writes_where_auto_looks(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("an old one")
    ran = shell("-m", "sparsecomm", "tune", *QUICK, ranks=2, SPARSECOMM_PROFILE=str(file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert profile.read(file).ranks == 2
    assert "Train with" not in ran.stdout
    program = "import sparsecomm as sc; e = sc.explain(10**6, 0.001); print(e.source)"
    ran = shell("-W", "error", "-c", program, ranks=2, SPARSECOMM_PROFILE=str(file))
    assert ran.stdout.splitlines() == [f"profile {file}"] * 2, ran.stderr


@needs_mpirun
@pytest.mark.mpi
def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "profile.json"
    ran = shell("-m", "sparsecomm", "tune", "--dry-run", "--output", str(file), *QUICK, ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Nothing was written." in ran.stdout
    assert not file.parent.exists()


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("nodes", "inside"), [([0, 0, 1], True), ([0, 1], False)], ids=["a pair and a single rank", "a rank each"]
)
def test_several_nodes(nodes: list[int], inside: bool, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    ran = shell("-c", NODES.format(nodes=nodes), "--output", str(file), *QUICK, ranks=len(nodes))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = profile.read(file)
    assert (made.ranks, made.num_nodes) == (len(nodes), 2)
    assert (made.costs.node is not None) is inside
    assert made.costs.node != made.costs.link
    assert all(0 < cost < 1 for cost in costs_of(made))
    assert f"on {len(nodes)} ranks of 2 nodes" in ran.stdout
    assert ("each rank has a node of its own" in ran.stdout) is not inside


@needs_mpirun
@pytest.mark.mpi
def test_names_ranks_that_do_not_see_the_file(tmp_path: Path) -> None:
    program = """
import sys
from mpi4py import MPI
from sparsecomm.cli import main, tune
if MPI.COMM_WORLD.rank == 1:
    tune._sees = lambda made, file: False
sys.exit(main(["tune", *sys.argv[1:]]))
"""
    ran = shell("-c", program, "--output", str(tmp_path / "profile.json"), *QUICK, ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ranks that do not see it there: 1. Copy it to their nodes." in ran.stdout


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_one_rank_is_refused() -> None:
    ran = shell("-m", "sparsecomm", "tune")
    assert ran.returncode == 1
    assert "run it under mpirun with the ranks that train" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.covering(0)
@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--output", "{folder}/a file/folder/profile.json"], "cannot be written"),
        (["--output", "{folder}"], "is no regular file"),
        (["--output", "/dev/null"], "is no regular file"),
        (["--dry-run", "--seconds", "0"], "--seconds 0: expected a number above 0"),
        (["--dry-run", "--seconds", "nan"], "--seconds nan: expected"),
    ],
)
def test_refused_once_before_anything_is_measured(options: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    ran = shell("-m", "sparsecomm", "tune", *(o.format(folder=tmp_path) for o in options), ranks=2)
    assert ran.returncode != 0
    assert ran.stderr.count("sparsecomm: ") == 1, ran.stderr
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout.strip() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["a file"]


def test_without_mpi() -> None:
    ran = shell("-m", "sparsecomm", "tune", MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert ran.returncode == 1
    assert "mpi4py cannot be loaded" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_numbers_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--seconds", "soon"])
    assert "invalid float value: 'soon'" in capsys.readouterr().err


# -- the fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(100e-6, 8e-9), (2e-6, 0.1e-9), (1e-6, 80e-9), (1e-3, 1e-12)])
def test_fit_of_a_line(alpha: float, beta: float) -> None:
    link = tune.fit([(size, alpha + beta * size) for size in SIZES])
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta), rel=0.02)


def test_fit_takes_beta_from_long_messages() -> None:
    """Some networks let short messages pass sooner than their rate says."""
    link = tune.fit([(size, 10e-6 if size < 4096 else 100e-9 * size) for size in SIZES[:7]])
    assert link.beta == pytest.approx(100e-9, rel=0.02)


SCATTER = {
    "all equal": [1e-3] * 9,
    "falling": [9e-4 - 1e-4 * i for i in range(9)],
    "few and short": [1e-9] * 4,
    "steep": [1e-6 * 4**i for i in range(9)],
}


@pytest.mark.parametrize("seconds", SCATTER.values(), ids=SCATTER)
def test_fit_of_anything_is_a_link(seconds: list[float]) -> None:
    link = tune.fit(list(zip(SIZES, seconds, strict=False)))
    assert isinstance(link, Link)
    assert 0 < link.alpha < 1
    assert 0 < link.beta < 1
