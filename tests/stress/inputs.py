"""Damaged profiles, states, DLPack capsules and odd arguments: each is taken, or refused by an error of the library.

A profile that is taken must serve to predict times. A state that is refused must leave the Reducer as it was; one that
is taken must let it make a step. A capsule that does not describe usable memory must be refused, its memory given back
once and once only. Several odd arguments of one call must be refused before it begins, or be taken.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.primitives.costs import Problem
from sparsecomm.transport import simulated
from sparsecomm.tuning import profile
from tests import test_odd_arguments as odd
from tests.stress.capsules import exporter
from tests.stress.chunks import run_chunks
from tests.stress.mutations import NUMBERS, damaged, damaged_text
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "damaged profiles, states and DLPack capsules, and odd arguments: each is taken or refused"

_CHUNK = 50_000


def _profile(rng: np.random.Generator) -> None:
    text = profile.Profile("Open MPI 5.0", 4, 2, profile.DEFAULT).as_json()
    if rng.random() < 0.2:
        (raw,) = damaged(np.frombuffer(text.encode(), np.uint8), 1, 0, [], rng)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            file.write_bytes(raw.tobytes())
            made = profile.read(file)
    else:
        made = profile.Profile.from_json(damaged_text(text, rng))
    problem = Problem(4, 1000, 10, 8.0, 4, 2, True)
    for algorithm in sc.algorithms().values():
        assert algorithm.predicted_time(problem, made.costs) >= 0, "a time of at least zero"
    assert profile.Profile.from_json(made.as_json()) == made, "a profile that can be written and read"


# -- states -----------------------------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None, "", "a", [], {}, (), object(), float("nan"), float("inf"), -1, True, b"x", [[1, 2], [3]], {"a": None},
    np.zeros(3, object), np.array(["x", "y"]), np.zeros((3, 2), complex), np.zeros(0), np.float32(1), *NUMBERS,
)  # fmt: skip


def _damage(state: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a copy in which a few things, at any depth, are others, are missing or have another name."""
    made = copy.deepcopy(state)
    for _ in range(rng.integers(1, 4)):
        place: Any = made
        while True:
            key = list(place)[rng.integers(len(place))] if len(place) else "a"
            if isinstance(place, dict) and isinstance(place.get(key), dict) and rng.random() < 0.7:
                place = place[key]
                continue
            break
        what = rng.integers(4)
        if what == 0:
            place.pop(key, None)
        elif what == 1:
            place[["b", "z", 3, None][rng.integers(4)]] = place.get(key)
        else:
            place[key] = _ODD[rng.integers(len(_ODD))]
    return made


def _reducer(ranks: simulated.SimulatedTransport, momentum: float) -> sc.Reducer:
    tensors = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(5), "empty": np.zeros((0, 3), np.float32)}
    return sc.Reducer(tensors, 0.5, comm=ranks, dense_below=0, momentum=momentum)


def _step(reducer: sc.Reducer) -> None:
    reducer.push("a", np.ones((3, 2), np.float32))
    reducer.wait()


def _state(rng: np.random.Generator) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        reducer = _reducer(ranks, float(rng.choice([0, 0.9])))
        _step(reducer)
        whole = reducer.state_dict()
        state = _damage(whole, rng)
        if rng.random() < 0.3:
            states = [_damage(whole, rng) if rng.random() < 0.5 else whole for _ in range(rng.integers(1, 3))]
            state = sc.reshard(states, *[int(rng.choice([0, 1, 2, -1, 2**62])) for _ in range(2)])
        before = copy.deepcopy(reducer.state_dict())
        try:
            reducer.load_state_dict(state)
        except sc.InvalidInputError:
            np.testing.assert_equal(reducer.state_dict(), before, "a refused state changed the Reducer")
            raise
        finally:
            _step(reducer)

    simulated.run(1, program)


# -- capsules ---------------------------------------------------------------------------------------------------------


def _capsule(rng: np.random.Generator) -> None:
    made = exporter(rng)
    calls: tuple[Callable[[], object], ...] = (
        lambda: sc.topk(made, 1.0),
        lambda: sc.threshold(made, 0.0),
        lambda: sc.SparseVector(np.arange(2), np.ones(2), 5).to_dense(out=made),
        lambda: sc.topk(np.ones(5, np.float32), 2, residual=made),
        lambda: simulated.run(1, lambda ranks: sc.sparse_allreduce(made, 1.0, comm=ranks)),
    )
    which = rng.integers(len(calls))
    try:
        calls[which]()
        refused = ""
    except sc.InvalidInputError as error:
        refused = str(error)
    assert refused or made.usable, "memory that does not describe itself well was taken"
    assert not refused or not made.usable or which in (2, 3), (
        f"memory that describes itself well was refused: {refused}"
    )
    gc.collect(0)
    if made.deletes:
        assert made.deleted == made.consumed, f"memory was given back {made.deleted} times"
    made.free()
    if refused:
        raise sc.InvalidInputError(refused)


# -- arguments --------------------------------------------------------------------------------------------------------


def _argument(rng: np.random.Generator) -> None:
    calls = (
        (odd.OF_CALLS, lambda ranks, **given: sc.sparse_allreduce(**{"x": odd.X, "k": 3, "comm": ranks, **given})),
        (odd.OF_REDUCERS, odd.reducer),
        (odd.OF_LOCAL_STEPS, odd.local_steps),
    )
    names, call = calls[rng.integers(len(calls))]
    values = [value for value in odd.VALUES.values() if not callable(value)]  # what a function raises is its own
    names = [name for name in names if name != "explain"]  # which prints
    given = {names[rng.integers(len(names))]: values[rng.integers(len(values))] for _ in range(rng.integers(1, 4))}

    def program(ranks: simulated.SimulatedTransport) -> None:
        before = ranks.number
        try:
            call(ranks, **given)
        except sc.InvalidInputError:
            assert ranks.number == before, f"{list(given)}: a call began"
            raise

    simulated.run(1, program)


TARGETS = {"profiles": _profile, "states": _state, "capsules": _capsule, "arguments": _argument}


def _attack(report: Report, first: int, inputs: int) -> None:
    for number in range(first, first + inputs):
        rng = np.random.default_rng([report.seed, number])
        name = list(TARGETS)[number % len(TARGETS)]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                TARGETS[name](rng)
            report.counts[f"{name} taken"] += 1
        except sc.SparseCommError:
            report.counts[f"{name} refused"] += 1
        except Exception as error:
            repeat = f"-m tests.stress inputs --seed {report.seed} --first {number} --inputs 1 --jobs 0"
            report.fail(f"{name}: {type(error).__name__}: {error}", repeat)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--inputs", type=int, default=100_000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; 0: none but this (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Give the library so many damaged inputs."""
    if arguments.jobs:
        run_chunks(report, ["inputs"], "inputs", arguments.inputs, _CHUNK, arguments.jobs, first=arguments.first)
    else:
        _attack(report, arguments.first, arguments.inputs)
