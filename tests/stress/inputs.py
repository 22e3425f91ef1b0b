"""Damaged profiles, states, DLPack capsules and odd arguments: each is taken, or refused by an error of the library.

A profile that is taken must serve to predict times. States of reducers and local steps are judged as by the attack
`states`. A capsule that does not describe usable memory must be refused, its memory given back
once and once only. Several odd arguments of one call must be refused before it begins, or be taken.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import sparsecomm as sc
from sparsecomm.primitives.costs import Problem
from sparsecomm.transport import simulated
from sparsecomm.tuning import profile
from tests import test_odd_arguments as odd
from tests.stress import states
from tests.stress.capsules import exporter
from tests.stress.harness import SANITIZED, Numbered, numbered
from tests.stress.mutations import damaged, damaged_text

__all__ = ["Inputs"]


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


def _state(rng: np.random.Generator) -> None:
    """Load damaged states as `tests.stress.states` does, of reducers and local steps."""
    case = states.Case(int(rng.integers(2**31)), int(rng.integers(2**31)), int(rng.integers(1, 3)), states.ON_HOST)
    each = case.simulate()
    if each[0].error:
        raise sc.InvalidInputError(each[0].raised)


# -- capsules ---------------------------------------------------------------------------------------------------------


def _capsule(rng: np.random.Generator) -> None:
    made = exporter(rng)
    calls: tuple[Callable[[], object], ...] = (
        lambda: sc.topk(made, 1.0),
        lambda: sc.threshold(made, 0.0),
        lambda: sc.SparseVector(np.arange(2), np.ones(2), 5).to_dense(out=made),
        lambda: sc.topk(np.ones(5, np.float32), 2, residual=made),
        lambda: simulated.run(1, lambda transport: sc.sparse_allreduce(made, 1.0, comm=transport)),
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
    if made.deletes:
        if made.deleted < made.consumed:
            gc.collect()  # an exception may have held it
        assert made.deleted == made.consumed, f"memory was given back {made.deleted} times"
    made.free()
    if refused:
        raise sc.InvalidInputError(refused)


# -- arguments --------------------------------------------------------------------------------------------------------


def _argument(rng: np.random.Generator) -> None:
    calls = (
        (
            odd.arguments(sc.sparse_allreduce),
            lambda transport, **given: sc.sparse_allreduce(**{"x": odd.X, "k": 3, "comm": transport, **given}),
        ),
        (odd.arguments(sc.Reducer), odd.reducer),
        (odd.arguments(sc.LocalSteps), odd.local_steps),
    )
    names, call = calls[rng.integers(len(calls))]
    values = [value for value in odd.VALUES.values() if not callable(value)]  # what a function raises is its own
    given = {names[rng.integers(len(names))]: values[rng.integers(len(values))] for _ in range(rng.integers(1, 4))}

    def program(transport: simulated.SimulatedTransport) -> None:
        before = transport.number
        try:
            call(transport, **given)
        except sc.InvalidInputError:
            assert transport.number == before, f"{list(given)}: a call began"
            raise

    simulated.run(1, program)


_TARGETS = {"profiles": _profile, "states": _state, "capsules": _capsule, "arguments": _argument}


class Inputs(Numbered):
    unit, chunk = "inputs", 16_000
    options = (*numbered(unit, 100_000), SANITIZED)

    def check(self, number: int) -> None:
        """Give the library a damaged input."""
        rng, name = np.random.default_rng([self.report.seed, number]), list(_TARGETS)[number % len(_TARGETS)]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                _TARGETS[name](rng)
            self.counts[f"{name} taken"] += 1
        except sc.SparseCommError:
            self.counts[f"{name} refused"] += 1
