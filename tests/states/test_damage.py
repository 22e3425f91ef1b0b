"""Random damages of states: all ranks load a state, or all refuse theirs and nothing changes."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.damage import damaged_state
from tests.ranks import run
from tests.states.subjects import KINDS, digest

CASES = 15
# If PyTorch's optimizers load settings and states, these may fail only in the next step.
FUZZED = ("Reducer", "LocalSteps", "SparseState", "DistributedOptimizer of SGD", "DiLoCo with SGD", "jax LocalSteps")
PART = {"DistributedOptimizer of SGD": "sparsecomm"}  # the only key with the same damage on all ranks
REFUSED = (sc.InvalidInputError, KeyboardInterrupt)  # the latter is raised by a state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FUZZED)
def test_all_ranks_load_a_damaged_state_or_none(kind: str) -> None:
    for number in range(CASES):
        random = np.random.default_rng(number)
        ranks = [[0], [1], [0, 1]][random.integers(3)]
        same = bool(random.integers(2)) and len(ranks) == 2
        steps, more = (int(count) for count in random.integers(1, 6, 2))

        def program(
            transport: simulated.SimulatedTransport,
            number: int = number,
            ranks: list[int] = ranks,
            same: bool = same,
            steps: int = steps,
            more: int = more,
        ) -> tuple[str, Any]:
            obj, step, weights, _ = KINDS[kind](transport)
            for i in range(steps):
                step(i)
            state = copy.deepcopy(obj.state_dict())
            for i in range(more):
                step(steps + i)
            before = digest(obj.state_dict())
            seed = [number, 0 if same else transport.rank]
            if transport.rank in ranks:
                state = damaged_state(state, np.random.default_rng(seed), PART.get(kind) if same else None)
            try:
                obj.load_state_dict(state)
            except REFUSED:
                assert digest(obj.state_dict()) == before, "a rank has refused a state, and has changed"
                return "refused", None
            for i in range(5):
                step(steps + i)
            return "loaded", digest(obj.state_dict().get("global_parameters", weights))

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            first, second = run(2, program)
        assert first == second, f"case {number}: ranks {ranks} have damaged states"


@pytest.mark.parametrize("kind", ["Reducer", "LocalSteps"])
def test_damaged_states_are_resharded_or_refused(kind: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        obj, step, *_ = KINDS[kind](transport)
        for i in range(5):
            step(i)
        return obj.state_dict()

    states = run(2, program)
    for number in range(300):
        bad = damaged_state(states[number % 2], np.random.default_rng(number))
        with suppress(*REFUSED):
            sc.reshard([bad, states[1 - number % 2]], number % 2, 2)
