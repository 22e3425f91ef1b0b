"""Damaged states, on one rank or on all: either all ranks load alike, or all refuse and nothing has changed.

In each case ranks train, save their states, train on, and load the states, some of which are damaged: other types and
shapes, truncations, foreign versions and keys, NaN, deep nesting, mappings and objects that raise. Then either every
rank has raised `InvalidInputError` (or the `KeyboardInterrupt` that its state raised), and not a bit of it has changed;
or all have loaded, hold alike what must be alike, and the next steps give all the same results. `reshard` of damaged
states refuses them, or gives states for which the same holds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.stress.chunks import add_case_options, check_each, run_cases
from tests.stress.damage import damaged
from tests.stress.jobs import SideChannel, run_ranks, say
from tests.stress.report import Report

__all__ = ["HELP", "ON_HOST", "Case", "add_arguments", "run", "simulate", "wrong"]

HELP = "damaged states: all ranks load alike, or none does"

_CHUNK = 250
_TIMEOUT = 30  # seconds: SPARSECOMM_TIMEOUT, on real ranks
_SHAPES = {"a": (3, 4), "b": (7,), "c": (20,), "d": (0, 2), "e": ()}
Arrays = dict[str, Any]


def _digest(value: Any) -> str:
    """Return a digest of nested values, bit for bit."""
    found = hashlib.sha1()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        elif hasattr(value, "__dlpack__") or isinstance(value, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(value.detach() if hasattr(value, "detach") else value)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()


def _arrays(rng: np.random.Generator, dtypes: Mapping[str, str]) -> Arrays:
    return {name: np.asarray(rng.normal(size=shape), dtypes[name]) for name, shape in _SHAPES.items()}


# -- what has a state -------------------------------------------------------------------------------------------------


class _Subject:
    """What ranks train, save and load; all choices follow from ``rng``, which is alike on all ranks.

    Attributes:
        part: of a state, the one that may be damaged alike on all ranks; ``None``: any. PyTorch's optimizers take
            settings and state that fail in the next step only.
        keys: of the state, what all ranks must hold alike.
        it: what has the state.
    """

    part: str | None = None
    keys: tuple[str, ...] = ()
    it: Any

    def __init__(self, comm: Any, rank: int, rng: np.random.Generator) -> None:
        self.rank = rank
        self.moves = np.random.default_rng([int(rng.integers(2**31)), rank])
        self.single = bool(rng.random() < 0.6)
        self.dtypes = {name: "float32" if self.single else str(rng.choice(["float32", "float64"])) for name in _SHAPES}
        self.make(comm, rng)

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        """Make it."""

    def step(self) -> Any:
        """Train a step; return what is alike on all ranks."""

    def finish(self) -> None:
        """End what is under way."""

    def state(self) -> Any:
        """Return the state, of which `load` takes copies."""
        return self.it.state_dict()

    def load(self, state: Any) -> None:
        """Load a state."""
        self.it.load_state_dict(state)

    def own(self) -> Any:
        """Return all that a refused state may not change."""
        return self.state()

    def common(self) -> Any:
        """Return what all ranks must hold alike."""
        state = self.state()
        return [state[key] for key in self.keys]


class _Reducer(_Subject):
    keys = ("step", "order", "bucket_bytes")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        like = _arrays(rng, self.dtypes)
        self.it = sc.Reducer(
            like,
            float(rng.choice([0.3, 1.0])),
            comm=comm,
            scope=str(rng.choice(["tensor", "bucket", "model", "chunk"])),  # type: ignore[arg-type]
            chunk=8,
            bucket_bytes=int(rng.choice([30, 4000])),
            dense_below=int(rng.choice([0, 10])),
            momentum=float(rng.choice([0, 0.5])),
            skip_nonfinite=bool(rng.integers(2)),
            reorder=bool(rng.integers(2)),
        )

    def step(self) -> Any:
        mine = _arrays(self.moves, self.dtypes)
        return self.it.reduce(mine).usable, mine

    def own(self) -> Any:
        return self.it.state_dict(), self.it.groups

    def common(self) -> Any:
        return super().common(), self.it.groups


class _LocalSteps(_Subject):
    keys = ("round", "local_step", "global_parameters", "outer", "exchanges")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        self.parameters = _arrays(rng, self.dtypes)
        self.it = sc.LocalSteps(
            self.parameters, 0.3, comm=comm, outer=sc.NesterovSGD() if rng.random() < 0.7 else None, **_schedule(rng)
        )

    def step(self) -> Any:
        for values in self.parameters.values():
            values += np.asarray(self.moves.normal(size=values.shape), values.dtype)
        self.it.step(self.parameters)
        return self.common()

    def finish(self) -> None:
        self.it.finish(self.parameters)


def _schedule(rng: np.random.Generator) -> dict[str, Any]:
    sync_every = int(rng.integers(2, 5))
    return {
        "sync_every": sync_every,
        "fragments": int(rng.integers(1, 3)),
        "fragment_sync_delay": int(rng.integers(0, sync_every)),
        "algorithm": "allgather",
        "scope": "tensor",
        "wire": "plain",
        "op": "mean",
        "dense_below": 0,
    }


class _SparseState(_Subject):
    keys = ("step", "order", "bucket_bytes", "loss_scale")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        from sparsecomm.torch import SparseState

        self.named = _module(rng)
        momentum = float(rng.choice([0, 0.5]))
        self.it = SparseState(self.named.items(), 0.3, comm=comm, dense_below=0, momentum=momentum)
        self.it._bound._scale = 8.0 if rng.integers(2) else None

    def step(self) -> Any:
        sums = {name: _move(self.moves, p) for name, p in self.named.items()}
        for name, gradient in sums.items():
            self.it._bound.push(name, gradient)
        self.it._bound.wait()
        return sums


class _DistributedOptimizer(_Subject):
    part = "sparsecomm"

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        from sparsecomm.torch import DistributedOptimizer

        self.named = _module(rng)
        self.it = DistributedOptimizer(_optimizer(rng, self.named), self.named.items(), 0.3, comm=comm, dense_below=0)

    def step(self) -> Any:
        for p in self.named.values():
            p.grad = _move(self.moves, p)
        self.it.step()
        return self.common()

    def common(self) -> Any:
        state = self.it.state_dict()
        return list(self.named.values()), state["state"], state["param_groups"], state["sparsecomm"]["step"]


class _DiLoCo(_LocalSteps):
    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import torch

        from sparsecomm.torch import DiLoCo

        named = self.named = _module(rng)
        model = torch.nn.Module()
        for name, p in named.items():
            model.register_parameter(name, p)
        self.inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = _optimizer(rng, named) if rng.random() < 0.8 else None
        self.it = DiLoCo(model, self.inner, outer, 0.3, comm=comm, **_schedule(rng))

    def step(self) -> Any:
        for p in self.named.values():
            p.grad = _move(self.moves, p)
        self.inner.step()
        return self.common()

    def finish(self) -> None:
        self.it.finish()


class _Jax(_LocalSteps):
    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import jax.numpy as jnp
        import optax  # type: ignore[import-untyped, unused-ignore]

        from sparsecomm.jax import LocalSteps

        self.params = {name: jnp.asarray(a) for name, a in _arrays(rng, dict.fromkeys(_SHAPES, "float32")).items()}
        outer = optax.sgd(0.7, 0.9, nesterov=True) if rng.random() < 0.8 else None
        self.it = LocalSteps(self.params, 0.3, comm=comm, outer=outer, **_schedule(rng))

    def step(self) -> Any:
        self.params = {
            name: a + np.asarray(self.moves.normal(size=a.shape), np.float32) for name, a in self.params.items()
        }
        self.params = self.it.step(self.params)
        return self.common()

    def finish(self) -> None:
        self.params = self.it.finish(self.params)


def _module(rng: np.random.Generator) -> dict[str, Any]:
    import torch

    arrays = _arrays(rng, dict.fromkeys(_SHAPES, "float32"))
    return {name: torch.nn.Parameter(torch.from_numpy(np.array(a))) for name, a in arrays.items()}


def _move(rng: np.random.Generator, p: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(rng.normal(size=tuple(p.shape)), np.float32))


def _optimizer(rng: np.random.Generator, named: Mapping[str, Any]) -> Any:
    import torch

    if rng.random() < 0.5:
        return torch.optim.SGD(named.values(), lr=0.7, momentum=0.9, nesterov=True)
    return torch.optim.Adam(named.values(), lr=0.1)


_KINDS: dict[str, tuple[type[_Subject], int]] = {  # of a hundred
    "Reducer": (_Reducer, 34),
    "LocalSteps": (_LocalSteps, 34),
    "SparseState": (_SparseState, 9),
    "DistributedOptimizer": (_DistributedOptimizer, 9),
    "DiLoCo": (_DiLoCo, 9),
    "jax.LocalSteps": (_Jax, 5),
}
ON_HOST = {name: _KINDS[name] for name in ("Reducer", "LocalSteps")}


# -- a case -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A case by its number; the same on all ranks.

    Attributes:
        P: how many ranks there are.
        kinds: of subjects, by how often they are drawn.
        whom: whose states are damaged: those of one rank, or of all, alike or not.
        resharded: the states are made of damaged ones by `reshard`.
    """

    seed: int
    number: int
    P: int
    kinds: Mapping[str, tuple[type[_Subject], int]] = field(default_factory=lambda: _KINDS)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, self.number])
        parts = np.array([part for _, part in self.kinds.values()])
        self.kind = list(self.kinds)[self.rng.choice(len(parts), p=parts / parts.sum())]
        self.whom = str(self.rng.choice(["one", "all alike", "all", "none"], p=[0.6, 0.2, 0.17, 0.03]))
        self.victim = int(self.rng.integers(self.P))
        self.steps = [int(n) for n in self.rng.integers(0, 6, 2)]
        self.resharded = self.kind in ("Reducer", "LocalSteps") and bool(self.rng.random() < 0.15)
        self.of_subject = int(self.rng.integers(2**31))

    def damaged(self, state: Any, rank: int, part: str | None) -> Any:
        """Return what a rank loads."""
        if self.whom == "none" or (self.whom == "one" and rank != self.victim):
            return state
        seed = [self.seed, self.number, 1] + [rank] * (self.whom == "all")
        return damaged(state, np.random.default_rng(seed), part if self.whom == "all alike" else None)

    def run(self, comm: Any, rank: int, gather: Callable[[Any], list[Any]]) -> _Outcome:
        """Run the case on a rank; ``gather`` returns what all ranks give it."""
        subject = _KINDS[self.kind][0](comm, rank, np.random.default_rng(self.of_subject))
        for _ in range(self.steps[0]):
            subject.step()
        state = subject.state()
        states = gather(state) if self.resharded else [state] * self.P
        for _ in range(self.steps[1]):
            subject.step()
        subject.finish()
        before, error, raised = _digest(subject.own()), "", ""
        mine = [self.damaged(each, r if self.resharded else rank, subject.part) for r, each in enumerate(states)]
        began = time.monotonic()
        try:
            subject.load(sc.reshard(mine, rank, self.P) if self.resharded else mine[rank])
        except BaseException as e:
            error = type(e).__name__
            raised = f"{error}: {e!s:.300}"
        late = time.monotonic() - began > _TIMEOUT / 2
        changed = _digest(subject.own()) != before
        return _Outcome(error, raised, changed, late, subject)


@dataclass
class _Outcome:
    error: str
    raised: str
    changed: bool
    late: bool
    subject: _Subject

    def go_on(self) -> str:
        """Train on; return a digest of what is alike, or what was raised."""
        try:
            common = [self.subject.common()]
            common += [self.subject.step() for _ in range(5)]
            self.subject.finish()
            return _digest([*common, self.subject.common()])
        except BaseException as e:
            return f"went on with {type(e).__name__}: {e!s:.500}"


_REFUSED = ("InvalidInputError", "KeyboardInterrupt")


def wrong(case: Case, each: list[_Outcome], after: list[str]) -> str:
    """Return what should not be; empty: all is well."""
    errors = [one.error for one in each]
    told = "; ".join(f"rank {rank}: {one.raised or 'loaded'}" for rank, one in enumerate(each))
    if any(one.late for one in each):
        return f"took as long as a timeout: {told}"
    if not any(errors):
        if any(text.startswith("went on with") for text in after):
            return f"all have loaded, and cannot go on: {after}"
        return "" if len(set(after)) == 1 else f"all have loaded, and differ afterwards: {after}"
    if not all(error in _REFUSED for error in errors):
        return f"not all ranks have loaded, or refused: {told}"
    if case.whom == "none":
        return f"a good state was refused: {told}"
    if changed := [rank for rank, one in enumerate(each) if one.changed]:
        return f"refused, and changed on {changed}: {told}"
    return ""


def _count(counts: Counter[str], case: Case, each: list[_Outcome]) -> None:
    outcome = "loaded" if not each[0].error else "refused"
    counts[f"{case.kind}{' after reshard' if case.resharded else ''}: {outcome}"] += 1
    counts["cases"] += 1


# -- simulated ranks --------------------------------------------------------------------------------------------------


def simulate(case: Case) -> tuple[list[_Outcome], list[str]]:
    states: list[Any] = [None] * case.P
    together: list[_Outcome] = [None] * case.P  # type: ignore[list-item]

    def program(ranks: simulated.SimulatedTransport) -> str:
        def gather(state: Any) -> list[Any]:
            states[ranks.rank] = state
            sc.check_weights({"a": np.zeros(1)}, comm=ranks)  # a barrier
            return states

        together[ranks.rank] = case.run(ranks, ranks.rank, gather)
        sc.check_weights({"a": np.zeros(1)}, comm=ranks)
        return "" if any(one.error for one in together) else together[ranks.rank].go_on()

    results = simulated.run(case.P, program, catch=True)
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise errors[0]
    return together, [str(result.value) for result in results]


# -- real ranks -------------------------------------------------------------------------------------------------------


def _run_rank(seed: int, first: int, states: int, side: SideChannel) -> None:
    counts, failures = Counter[str](), list[str]()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    for number in range(first, first + states):
        case = Case(seed, number, side.size)
        case.resharded = False
        mine = case.run(side.comm, side.rank, lambda state: [state])
        told = side.gather((mine.error, mine.raised.encode(errors="replace").decode(), mine.changed, mine.late))
        each = [_Outcome(*one, mine.subject) for one in told]
        errors = [one.error for one in each]
        after = [] if any(errors) else side.gather(mine.go_on())
        if side.rank == 0:
            _count(counts, case, each)
            if what := wrong(case, each, after):
                failures.append(f"state {number}, {case.kind}, {case.whom}: {what}")
        if any(error not in ("", *_REFUSED) for error in errors):
            sc.realign(side.comm)
        if side.rank == 0 and number % 100 == 99:
            print(f"progress: {number + 1 - first} of {states} states", flush=True)
    say(counts, {}, failures)


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_case_options(parser, "states", 10_000)
    parser.add_argument("--over", choices=["simulated", "mpi", "gloo"], default="simulated", help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Load so many damaged states."""
    first, number, over = arguments.first, arguments.cases, arguments.over

    def one(number: int) -> None:
        case = Case(report.seed, number, 2 + number % 2)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            each, after = simulate(case)
        _count(report.counts, case, each)
        what = wrong(case, each, after)
        assert not what, f"{case.kind}, {case.whom}: {what}"

    if over == "simulated":
        run_cases(report, arguments, "states", _CHUNK, lambda: check_each(report, arguments, "states", one))
    else:
        repeat = f"--over {over} --first {first} --states {number}"
        run_ranks(report, 2, "states", [report.seed, first, number], 120 + 2.0 * number, repeat, over)


if __name__ == "__main__":
    os.environ["SPARSECOMM_TIMEOUT"] = str(_TIMEOUT)
    _run_rank(*map(int, sys.argv[1:4]), SideChannel(*sys.argv[4:]))
