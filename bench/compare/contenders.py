"""What is compared: the algorithms of sparsecomm and the baselines, behind one interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import sparsecomm as sc
from bench.baselines import BASELINES, Baseline
from bench.compare.checks import (
    COMM,
    SAMPLE,
    Array,
    Inputs,
    differs,
    gathered,
    wrong_entries,
    wrong_selection,
    wrong_sum,
)
from bench.compare.replay import Recorder, Replay
from sparsecomm import transport
from sparsecomm.algorithms import ALGORITHMS, Communicator
from sparsecomm.backends import CpuBackend
from sparsecomm.cli.oracles import reduce_entries
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.wire import EXACT, OPS, CallSignature, Messages

# `hierarchical_dense` is not among them: it sums before it selects.
OURS = tuple(name for name in ALGORITHMS if name != "hierarchical_dense")
USUAL = ("dense", "allgather", "tree", "butterfly", "split")


class Contender:
    """Something that sums gradients. ``before`` sets up what a method in ``kinds`` starts from, and is not timed."""

    name: str
    sparse: bool
    slow = False
    kinds: tuple[str, ...] = ("step", "exchange")  # what is timed

    def before(self, kind: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """From gradient and residual to the dense sum, in ``out``."""
        raise NotImplementedError

    def exchange(self) -> None:
        """From what each rank has selected to the sum."""
        raise NotImplementedError

    def sent(self) -> float:
        """Bytes that this rank has sent so far."""
        raise NotImplementedError

    def parts(self) -> dict[str, float]:
        """Seconds that the last exchange spent in its arithmetic, by what it did."""
        return {}

    def check(self) -> str | None:
        """What is wrong with the result of a step, on this rank. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class TimedBackend:
    """Backend that say for how long they ran."""

    def __init__(self) -> None:
        self._backend = CpuBackend()
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._backend, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        self.__dict__[name] = timed  # asked for once
        return timed


class Given:
    """In place of `sparsecomm.feedback.Gradient`: entries that were selected before, and no residual."""

    def __init__(self, entries: sc.SparseVector | None, whole: Array, shape: tuple[int, ...]) -> None:
        self.entries, self._whole, self.shape = entries, whole, shape

    def topk(self, k: int) -> sc.SparseVector | None:
        return self.entries

    def whole(self) -> Array:
        return self._whole

    def put_back(self, entries: sc.SparseVector) -> None:
        pass

    def rest(self, total: Array, k: int) -> sc.SparseVector:
        raise NotImplementedError("who sums before selecting is not compared")


class Ours(Contender):
    """An algorithm of sparsecomm. Of kind "plain" are its messages alone, by mpi4py."""

    kinds = ("step", "exchange", "plain")

    def __init__(self, name: str, inputs: Inputs, wire: str) -> None:
        """``wire``: its format, or "auto"."""
        self.name, self.sparse, self.inputs = name, name != "dense", inputs
        self.ranks = transport.of(COMM)
        found = sc.explain(inputs.n, inputs.k, comm=COMM, algorithm=name, wire=wire)
        self.wire = found.candidates[0].wire
        self.problem = found.query.problem(self.wire)  # what its bound depends on
        self.backend = TimedBackend()
        self.selected = sc.topk(inputs.x, inputs.k) if self.sparse else None
        self.recorder = Recorder(self.ranks)
        self._run(self.recorder)
        self._replay = Replay(self.recorder)

    def before(self, kind: str) -> None:
        if kind == "step":
            self.inputs.r.fill(0)
        elif not self.sparse:
            np.copyto(self.inputs.out, self.inputs.x)  # summed in place
        self.backend.seconds.clear()

    def step(self) -> None:
        i = self.inputs
        sc.sparse_allreduce(i.x, i.k, comm=COMM, algorithm=self.name, residual=i.r, out=i.out, wire=self.wire.name)

    def exchange(self) -> None:
        self._run(self.ranks)

    def plain(self) -> None:
        self._replay.run()

    def _run(self, ranks: transport.Transport) -> None:
        i = self.inputs
        call = CallSignature(self.name, FLOAT32.code, OPS.index("sum"), self.wire.code, i.n, i.k)
        messages = Messages(call, ranks.rank, FLOAT32.accumulator, i.x.shape, self.backend)
        group = Communicator(ranks, self.backend, messages, self.wire)
        ALGORITHMS[self.name].run(group, Given(self.selected, i.out, i.x.shape), i.k)
        group.end()

    def sent(self) -> float:
        return self.ranks.counters.bytes_sent

    def parts(self) -> dict[str, float]:
        return dict(self.backend.seconds)

    def check(self) -> str | None:
        i = self.inputs
        self.before("step")
        self.step()
        if not self.sparse:
            return wrong_sum(i, 4 * COMM.size * np.finfo(np.float32).eps)
        mine = self.selected.indices, self.selected.values
        oracle = (
            (lambda every: reduce_entries(self.name, every, i.k, self.ranks.node_of_rank))
            if self.wire.kind == EXACT
            else None
        )
        return wrong_selection(i, mine) or wrong_entries(i, mine, oracle) or self._lost()

    def _lost(self) -> str | None:
        """Nothing may be lost: residuals and result make up what there was, at every sampled place."""
        i = self.inputs
        kept = np.sum(gathered(i.r[::SAMPLE]), axis=0, dtype=np.float64) + i.out[::SAMPLE]
        return differs(kept, np.array(gathered(i.x[::SAMPLE]), np.float64), 4 * COMM.size * np.finfo(np.float32).eps)


class Theirs(Contender):
    def __init__(self, kind: type[Baseline], inputs: Inputs) -> None:
        self.baseline, self.inputs = kind(COMM), inputs
        self.name, self.sparse, self.slow = kind.name, kind.sparse, kind.slow
        if kind.whole:
            self.kinds, self.selected = ("step",), None
        else:
            self.selected = self._select()

    def _select(self) -> Any:
        self.inputs.r.fill(0)
        return self.baseline.select(self.inputs.x, self.inputs.r, self.inputs.k)

    def before(self, kind: str) -> None:
        if kind == "step":
            self.inputs.r.fill(0)

    def step(self) -> None:
        self.baseline.step(self.inputs.x, self.inputs.r, self.inputs.k, self.inputs.out)

    def exchange(self) -> None:
        self.baseline.exchange(self.selected)

    def sent(self) -> float:
        return self.baseline.sent

    def check(self) -> str | None:
        i, eps = self.inputs, 4 * COMM.size * np.finfo(np.float32).eps
        self.before("step")
        self.step()
        if self.name == "int8":
            largest = COMM.allreduce(np.abs(i.x).max(), MPI.SUM) / 254
            return wrong_sum(i, eps, largest + (np.abs(i.out).max() + largest) / 250)
        if not self.sparse:
            return wrong_sum(i, eps)
        if self.name != "gtopk-paper":
            name, mine = "allgather", self.selected
        else:
            name, mine = "tree", (self.selected[0], self.selected[1].astype(np.float64))
        oracle = lambda every: reduce_entries(name, every, i.k, range(COMM.size))  # noqa: E731
        return wrong_selection(i, self.selected) or wrong_entries(i, mine, oracle, eps)

    def close(self) -> None:
        self.baseline.close()


def contenders(inputs: Inputs, only: set[str], wire: str, say: Callable[[str], None]) -> Iterator[Contender]:
    for name in OURS:
        if name in only:
            yield Ours(name, inputs, wire)
    for name, kind in BASELINES.items():
        if name in only:
            try:
                yield Theirs(kind, inputs)
            except ValueError as error:  # on every rank
                say(f"left out: {error}")


def checked(found: list[Contender], say: Callable[[str], None]) -> list[str]:
    """What is wrong, on any rank."""
    wrong = []
    for c in found:
        said = [f"{c.name}, rank {rank}: {text}" for rank, text in enumerate(COMM.allgather(c.check())) if text]
        say(f"checked {c.name}" if not said else f"WRONG: {said[0]}")
        wrong += said
    return wrong
