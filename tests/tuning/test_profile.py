"""Profiles: valid and invalid files, and ranks with different profiles."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.transport import simulated
from sparsecomm.tuning import profile
from sparsecomm.tuning.profile import DEFAULT, Profile

COSTS = Costs(Link(5e-5, 1e-9), Link(1e-6, 1e-10), select=2e-10, merge=2e-9, codec=2e-9, add=3e-10)
MADE = Profile("An MPI 1.2", 4, 2, COSTS)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(MADE.as_json()), **fields})


def with_costs(**costs: Any) -> str:
    return changed(costs={**json.loads(MADE.as_json())["costs"], **costs})


# -- the file ---------------------------------------------------------------------------------------------------------

UNUSABLE = {
    "no JSON": ("{", "JSONDecodeError"),
    "no schema": ("{}", "KeyError: 'schema'"),
    "another schema": (changed(schema=2), "by another version"),
    "a cost too many": (with_costs(sort=1e-9), "cannot be read"),
    "a cost that is text": (with_costs(merge="fast"), "not a number of seconds"),
    "a negative cost": (with_costs(merge=-1e-9), "not a number of seconds"),
    "NaN": (with_costs(add=math.nan), "not a number of seconds"),
    "half a link": (with_costs(link={"alpha": 1e-6}), "cannot be read"),
    "no end of ranks": (changed(ranks=math.inf), "cannot be read"),
    "a cost that is true": (with_costs(add=True), "not a number of seconds"),
    "too deep": ("[" * 100_000, "cannot be read"),
}


def test_what_cannot_be_read(tmp_path: Path) -> None:
    fifo, large, binary = tmp_path / "fifo", tmp_path / "large.json", tmp_path / "profile.json"
    os.mkfifo(fifo)
    large.write_text(MADE.as_json().ljust(2**20 + 1))
    binary.write_bytes(b"\xff\xfe\x80")
    special = "cannot be read: it is not a regular file of at most 1 MiB"
    for file, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "regular file"),
        (binary, "not text"),
        *((file, special) for file in (fifo, Path("/dev/zero"), large)),  # a FIFO and a device have no end
    ):
        with pytest.raises(sc.InvalidInputError, match=why):
            profile.read(file)


def test_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert profile.path() == tmp_path / "caches" / "sparsecomm" / "profile.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert profile.path() == Path("/home/somebody/.cache/sparsecomm/profile.json")
    monkeypatch.setenv("SPARSECOMM_PROFILE", "~/mine.json")
    assert profile.path() == Path("/home/somebody/mine.json")


# -- the costs in use -------------------------------------------------------------------------------------------------

Put = Callable[[str], Path]


@pytest.fixture(params=["named", "found"])
def put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Put:
    """Write a profile to the default path."""

    def write(text: str) -> Path:
        file = profile.path()
        if request.param == "named":
            file = tmp_path / "named.json"
            monkeypatch.setenv("SPARSECOMM_PROFILE", str(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


def used_with_warnings() -> tuple[profile.KnownCosts | None, list[str]]:
    """Return the costs, requested twice, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        used = profile.costs_for("An MPI 1.2", 4, 2)
        assert profile.costs_for("An MPI 1.2", 4, 2) == used
    assert all(warning.category is RuntimeWarning for warning in said)
    return used, [str(warning.message) for warning in said]


def test_used(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    assert used_with_warnings() == (None, [])
    file = put(MADE.as_json())
    profile._costs_for.cache_clear()
    used, said = used_with_warnings()
    assert used is not None
    assert (used.costs, used.source, said) == (COSTS, f"profile {file}", [])
    assert used.checksum not in (0, profile.KnownCosts(DEFAULT, "").checksum)
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")
    used, said = used_with_warnings()
    assert used is not None
    assert (used.costs, used.source, said) == (DEFAULT, "SPARSECOMM_PROFILE=none, 1 Gb/s assumed", [])


STALE = {
    "MPI": (changed(mpi="An MPI 1.3"), "it is for MPI An MPI 1.3, and this is An MPI 1.2"),
    "ranks": (changed(ranks=8), "it is for ranks 8, and this is 4"),
    "nodes": (changed(nodes=4), "it is for nodes 4, and this is 2"),
}


@pytest.mark.parametrize(("text", "says"), (STALE | UNUSABLE).values(), ids=STALE | UNUSABLE)
def test_what_cannot_be_used_is_warned_of_once(put: Put, text: str, says: str) -> None:
    file = put(text)
    used, said = used_with_warnings()
    assert used is None
    (warning,) = said
    assert str(file) in warning
    assert says in warning
    assert "sparsecomm tune" in warning


@pytest.mark.parametrize("stat", [PermissionError("closed"), None])
def test_a_folder_that_is_closed_and_no_home_are_no_news(stat: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise stat if stat is not None else KeyError("nobody")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.stat" if stat is not None else "pwd.getpwuid", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile.costs_for("An MPI 1.2", 4, 2) is None


# -- ranks with different profiles ------------------------------------------------------------------------------------


def on_ranks_with_profiles(
    patch: pytest.MonkeyPatch, folder: Path, costs: list[Costs | None], nodes: list[int], **options: Any
) -> list[simulated.Result[sc.SparseVector]]:
    """Make a call with one rank per profile; ``None``: no profile."""

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        own_costs, file = costs[transport.rank], folder / f"{transport.rank}.json"
        if own_costs is not None:
            file.write_text(Profile("simulated", len(costs), transport.num_nodes, own_costs).as_json())
        # The rank reads it before it first waits.
        patch.setenv("SPARSECOMM_PROFILE", "" if own_costs is None else str(file))
        return sc.sparse_allreduce(np.arange(1, 1001, dtype=np.float32), 10, comm=transport, **options)

    return simulated.run(len(costs), program, node_of_rank=nodes, catch=True)


BETWEEN = replace(COSTS, node=None)


@pytest.mark.parametrize("other", [replace(BETWEEN, merge=2.1e-9), None], ids=["another", "none"])
@pytest.mark.parametrize("options", [{}, {"algorithm": "allgather", "wire": "packed"}], ids=str)
def test_different_profiles_are_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Costs | None, options: dict[str, Any]
) -> None:
    results = on_ranks_with_profiles(monkeypatch, tmp_path, [BETWEEN] * 2 + [other], [0, 1, 2], **options)
    assert [type(result.error) for result in results] == [sc.CollectiveMismatchError] * 3
    assert all("SPARSECOMM_PROFILE" in str(result.error) for result in results)


def test_on_one_node_profiles_do_not_matter_to_what_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = [BETWEEN, None, replace(BETWEEN, add=0.0)]
    results = on_ranks_with_profiles(monkeypatch, tmp_path, costs, [0, 0, 0], algorithm="tree", wire="packed")
    assert [result.error for result in results] == [None] * 3
