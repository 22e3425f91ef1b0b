"""Interrupts of one of two real ranks, over MPI and over gloo: at every place in Python code, and by real signals.

Rank 1 is interrupted at the n-th place within the library's Python code, for n = 0, stride, 2 stride ... until there
are no more. Compiled code has no such places, only waits that ask for signals: real signals at random times find these.
Then both ranks go on as docs/footguns.md says. Afterwards all must be as if there had been no interrupt, bit for bit.
In a first call gradients must be where `last_call` says, and the next call right. A wait as long as the timeout is a
hang. The report counts the places by file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.interrupts import LIBRARY, InterruptError, Points, interrupted
from tests.stress.jobs import SideChannel, run_ranks, say
from tests.stress.report import Report
from tests.stress.signals import Alarm

__all__ = ["HELP", "add_arguments", "run"]

HELP = "interrupts at every place and by signals, on real ranks"

_TIMEOUT = 20  # seconds: SPARSECOMM_TIMEOUT
_SHAPES = {"a": (30,), "b": (7, 3), "c": (2,)}
_REDUCER: dict[str, Any] = {"op": "sum", "dense_below": 3}
_LOCAL: dict[str, Any] = {"scope": "tensor", "algorithm": "allgather", "op": "mean", "wire": "plain", "dense_below": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--stride", type=int, default=1, help="every so many places; 0: none (%(default)s)")
    parser.add_argument("--signals", type=int, default=200, help="at random times, in each scene (%(default)s)")
    parser.add_argument("--over", nargs="+", default=["mpi", "gloo"], help="(mpi gloo); torch-hook over gloo only")
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), help=f"({' '.join(SCENES)})")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Interrupt all scenes."""
    stride, signals = arguments.stride, arguments.signals
    for over in arguments.over:
        for scene in arguments.scenes:
            if scene.startswith("torch-hook") and over == "mpi":
                continue  # DistributedDataParallel has a process group
            repeat = f"--stride {stride} --signals {signals} --over {over} --scenes {scene}"
            words = [scene, stride, report.seed % max(1, stride), signals, report.seed]
            run_ranks(report, 2, "interrupts", words, 3600, repeat, over)


# -- on the ranks -----------------------------------------------------------------------------------------------------


class Ranks(SideChannel):
    """Both ranks: their communicators, and what they tell each other besides the library."""

    def again(self, comm: Any, act: Callable[[], Any]) -> list[str]:
        """Do something in which one call is made; after an error on any rank, realign and do it again on both.

        Returns: what this rank raised.
        """
        import sparsecomm as sc

        raised: list[str] = []
        for _ in range(3):
            before = sc.last_call(comm).number
            failed = realigned = False
            try:
                act()
            except (InterruptError, sc.SparseCommError) as error:
                failed = True
                raised.append(f"{type(error).__name__}: {error}")
                if isinstance(error, InterruptError):
                    time.sleep(0.2)  # a call may have been submitted: it is then made
                skipped = isinstance(error, InterruptError) and sc.last_call(comm).number == before
                if skipped or "sparsecomm.realign()" in str(error):  # the other one waits in that call, or in realign
                    sc.realign(comm)
                    realigned = True
            told = self.gather((failed, realigned))
            if not any(each[0] for each in told):
                return raised
            if not all(each[1] for each in told):
                sc.realign(comm)
        raise AssertionError(f"not usable again: {raised}")


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return whole numbers, whose sums are exact."""
    random = np.random.default_rng((rank, step))
    return {name: random.integers(-9, 10, shape).astype(np.float32) for name, shape in _SHAPES.items()}


def bits(*arrays: Any) -> list[bytes]:
    return [array.tobytes() for each in arrays for array in each.values()]


def first_call(ranks: Ranks, within: Callable[[], Any]) -> Any:
    """A first call: where the gradient is, `last_call` says; the next one is right."""
    import sparsecomm as sc

    comm, x = ranks.new(), np.arange(40, dtype=np.float32) - 17 - ranks.rank
    residual = np.ones(40, np.float32)
    out = np.empty(40, np.float32)

    def call() -> None:
        sc.sparse_allreduce(x, 5, comm=comm, algorithm="butterfly", residual=residual, out=out)

    before, failed = residual.copy(), False
    try:
        with within():
            call()
    except (InterruptError, sc.SparseCommError) as error:
        failed, last = True, sc.last_call(comm)
        kept = np.array_equal(residual, before + x)
        if isinstance(error, InterruptError):
            if last.number == 0:
                assert np.array_equal(residual, before), "an interrupt before the call has changed the residual"
                sc.realign(comm)
            else:
                assert kept or last.counts, "after the call began the residual is not residual + x"
        else:
            assert kept, "after an error of the library the residual is not residual + x"
            if "sparsecomm.realign()" in str(error):
                sc.realign(comm)
    if any(ranks.gather(failed)):
        sc.realign(comm)
    residual[:] = before
    call()
    return bits({"residual": residual, "out": out})


def reducer_step(options: dict[str, Any], number: int) -> Callable[[Ranks, Callable[[], Any]], Any]:
    """Steps of a reducer, one of which is interrupted; the program asks `parts` and `step` how to go on."""

    def scene(ranks: Ranks, within: Callable[[], Any]) -> Any:
        import sparsecomm as sc

        reducer = sc.Reducer(gradients(0, 0), 0.2, comm=ranks.new(), **_REDUCER, **options)
        outs = {name: np.zeros(shape, np.float32) for name, shape in _SHAPES.items()}
        applied = {name: np.zeros(shape, np.float32) for name, shape in _SHAPES.items()}

        def until(act: Callable[[], Any], done: Callable[[], bool]) -> None:
            while True:
                try:
                    if done():
                        return
                    act()
                except InterruptError:  # noqa: PERF203
                    continue

        def step(given: dict[str, np.ndarray], number_of: int) -> None:
            parts = {
                name: ([gradient] if "clip" in options else [gradient, gradient]) for name, gradient in given.items()
            }
            for name, each in parts.items():
                for part in each[1:]:
                    until(lambda n=name, p=part: reducer.accumulate(n, p), lambda n=name: reducer.parts(n) == 1)
                until(
                    lambda n=name, p=each[0]: reducer.push(n, p, out=outs[n]),
                    lambda n=name, e=each: reducer.parts(n) == len(e),
                )
            until(lambda: reducer.wait(), lambda: reducer.step > number_of)

        for i in range(3):
            with within() if i == number else interrupted():
                step(gradients(ranks.rank, i), i)
            assert reducer.last is not None
            assert reducer.step == i + 1
            for name, out in outs.items():
                applied[name] += out
        return bits(applied, {name: np.asarray(reducer.residual(name)) for name in _SHAPES})

    return scene


def local_step(options: dict[str, Any], number: int) -> Callable[[Ranks, Callable[[], Any]], Any]:
    """Local steps, one of which is interrupted: `round` and `local_step` say how to go on."""

    def scene(ranks: Ranks, within: Callable[[], Any]) -> Any:
        import sparsecomm as sc

        parameters = {name: np.zeros(shape, np.float32) for name, shape in _SHAPES.items()}
        outer = sc.NesterovSGD(0.5, 0.5)
        settings = _LOCAL | {"decay": 0.5, "sync_every": 2} | options
        local = sc.LocalSteps(parameters, 0.5, comm=ranks.new(), outer=outer, **settings)
        delayed = bool(options.get("fragment_sync_delay"))

        def act() -> None:
            local.step(parameters)

        for i in range(6):
            for name, move in gradients(ranks.rank, i).items():
                parameters[name] += move
            try:
                with within() if i == number else interrupted():
                    act()
            except InterruptError:
                if 2 * local.round + local.local_step == i:
                    local.step(parameters)
                elif not delayed:
                    local.finish(parameters)
        held = bits(local.global_parameters())
        assert held == ranks.gather(held)[0], "global parameters differ between ranks"
        return None if delayed else held + bits(parameters)

    return scene


def rebuild_reducer(ranks: Ranks, within: Callable[[], Any]) -> Any:
    """A rebuild of a reducer, which is made again on both ranks after an error on one."""
    import sparsecomm as sc

    comm = ranks.new()
    reducer = sc.Reducer(gradients(0, 0), 0.2, comm=ranks.new(), **_REDUCER)
    reducer.reduce(gradients(ranks.rank, 0))
    sc.realign(comm)

    def act() -> None:
        with first():
            reducer.rebuild(comm)

    first = once(within)
    ranks.again(comm, act)
    step = gradients(ranks.rank, 1)
    reducer.reduce(step)
    return bits(step, {name: np.asarray(reducer.residual(name)) for name in _SHAPES})


def rebuild_local(ranks: Ranks, within: Callable[[], Any]) -> Any:
    """A rebuild of local steps, made again on a new communicator after an error. The other rank may time out before."""
    import sparsecomm as sc

    parameters = {name: np.zeros(shape, np.float32) for name, shape in _SHAPES.items()}
    local = sc.LocalSteps(parameters, 0.5, comm=ranks.new(), outer=sc.NesterovSGD(0.5, 0.5), sync_every=1, **_LOCAL)

    def train(step: int) -> None:
        for name, move in gradients(ranks.rank, step).items():
            parameters[name] += move
        local.step(parameters)

    train(0)
    first, failed = once(within), True
    while any(ranks.gather(failed)):
        comm, failed = ranks.new(), False  # what was broadcast over another one may not pair any more

        def act(comm: Any = comm) -> None:
            local.rebuild(comm, parameters)

        try:
            with first():
                act()
        except (InterruptError, sc.SparseCommError):
            failed = True
    train(1)
    return bits(parameters, local.global_parameters())


def load_reducer(ranks: Ranks, within: Callable[[], Any]) -> Any:
    """A state that is loaded: on both ranks or on none."""
    import sparsecomm as sc

    comm = ranks.new()
    reducer = sc.Reducer(gradients(0, 0), 0.2, comm=comm, **_REDUCER)
    reducer.reduce(gradients(ranks.rank, 0))
    state = reducer.state_dict()
    reducer.reduce(gradients(ranks.rank, 1))
    first = once(within)

    def act() -> None:
        with first():
            reducer.load_state_dict(state)

    ranks.again(comm, act)
    assert ranks.gather(reducer.step) == [1, 1]
    step = gradients(ranks.rank, 2)
    reducer.reduce(step)
    return bits(step, {name: np.asarray(reducer.residual(name)) for name in _SHAPES})


def load_local(ranks: Ranks, within: Callable[[], Any]) -> Any:
    """A state of local steps, in the middle of a round and with an exchange under way, that is loaded again."""
    import sparsecomm as sc

    parameters = {name: np.zeros(shape, np.float32) for name, shape in _SHAPES.items()}
    outer, comm = sc.NesterovSGD(0.5, 0.5), ranks.new()
    settings = _LOCAL | {"sync_every": 3, "fragment_sync_delay": 2, "decay": 0.5}
    local = sc.LocalSteps(parameters, 0.5, comm=comm, outer=outer, **settings)

    def train(steps: range) -> None:
        for step in steps:
            for name, move in gradients(ranks.rank, step).items():
                parameters[name] += move
            local.step(parameters)

    train(range(7))  # the exchange of the second round began in the sixth local step
    state, saved = local.state_dict(), {name: array.copy() for name, array in parameters.items()}
    assert state["exchanges"]
    assert state["local_step"]
    train(range(7, 8))
    local.finish(parameters)
    first = once(within)

    def act() -> None:
        with first():
            local.load_state_dict(state)

    again_loaded = ranks.again(comm, act)
    assert ranks.gather((local.round, local.local_step)) == [(2, 1)] * 2, again_loaded
    for name, array in saved.items():
        parameters[name][...] = array
    train(range(7, 10))
    local.finish(parameters)
    return bits(parameters, local.global_parameters())


def torch_step(kind: str, number: int) -> Callable[[Ranks, Callable[[], Any]], Any]:
    """Steps of a model in PyTorch, one of which is interrupted: all ranks then begin from what they saved before it.

    Before that, the interrupted rank tries to go on as if nothing had been: an error says what to do, or nothing had.
    """

    def scene(ranks: Ranks, within: Callable[[], Any]) -> Any:
        import torch

        import sparsecomm as sc
        from sparsecomm.torch import DistributedOptimizer, register

        options: dict[str, Any] = {"scope": "tensor", "dense_below": 3}
        comm = ranks.new()

        def make(saved: Any) -> tuple[Any, Any, Any]:
            """Return a model, its optimizer and what has the state of the exchange."""

            def forward(given: Any) -> Any:
                return sum((p * given[name]).sum() for name, p in named)

            module = torch.nn.Module()
            for name, shape in _SHAPES.items():
                module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            named = list(module.named_parameters())
            module.forward = forward
            if saved is not None:
                module.load_state_dict(saved[0])
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
            if kind == "hook":
                module = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-5, init_sync=False)
                holder: Any = register(module, 0.2, comm=comm, **options)
                if saved is not None:
                    optimizer.load_state_dict(saved[1])
            else:
                optimizer = holder = DistributedOptimizer(
                    optimizer, module.named_parameters(), 0.2, comm=comm, **options
                )
            if saved is not None:
                holder.load_state_dict(saved[2])
            return module, optimizer, holder

        def goes_on(step: int) -> None:
            """Go on as if nothing had been, after an interrupt: an error says what to do, unless all is as it was."""
            parameters = holder._bound if kind == "hook" else holder._exchange
            if not parameters.used or (kind == "hook" and step == 0):  # in which DDP itself would wait for the others
                return
            if kind == "optimizer" and holder._exchange._pass is None and not holder._exchange.divided:
                return
            try:
                train(step)
            except RuntimeError:  # of DistributedDataParallel, which has not finished the pass before
                assert kind == "hook"
            except sc.InvalidInputError as error:
                if "load a checkpoint" not in str(error) and "synchronize()" not in str(error):
                    raise
            else:
                raise AssertionError("went on as if nothing had been")

        def train(step: int) -> None:
            given = {name: torch.from_numpy(g) for name, g in gradients(ranks.rank, step).items()}
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()

        model, optimizer, holder = make(None)
        for step in range(3):
            weights, saved, error = getattr(model, "module", model), None, None
            if step:
                saved = copy.deepcopy((weights.state_dict(), optimizer.state_dict(), holder.state_dict()))
            try:
                with within() if step == number else interrupted():
                    train(step)
            except (InterruptError, sc.SparseCommError) as raised:
                error = raised
            if isinstance(error, InterruptError):
                goes_on(step)
            if any(ranks.gather(error is not None)):
                if kind == "optimizer":
                    optimizer.remove()
                sc.realign(comm)
                assert sc.sparse_allreduce(np.ones(3, np.float32), 1, comm=comm).nnz == 1  # it can be used again
                comm = ranks.new()  # the reducers that it had may not be as many on all ranks
                model, optimizer, holder = make(saved)
                train(step)
        module = getattr(model, "module", model)
        held = [p.detach().numpy().tobytes() for p in module.parameters()]
        assert held == ranks.gather(held)[0], "weights differ between ranks"
        residuals = holder.state_dict() if kind == "hook" else holder.state_dict()["sparsecomm"]
        return held + [kept.numpy().tobytes() for kept in residuals["residuals"].values()]

    return scene


def once(within: Callable[[], Any]) -> Callable[[], Any]:
    """Return what interrupts the first time only."""
    used: list[None] = []

    def first() -> Any:
        used.append(None)
        return within() if len(used) == 1 else interrupted()

    return first


SCENES: dict[str, Callable[[Ranks, Callable[[], Any]], Any]] = {
    "first-call": first_call,
    "reducer-first": reducer_step({}, 0),
    "reducer": reducer_step({"scope": "tensor"}, 1),
    "reducer-momentum": reducer_step({"momentum": 0.5, "reorder": False}, 1),
    "reducer-clip": reducer_step({"clip": 5.0, "reorder": False}, 1),
    "reducer-nonfinite": reducer_step({"skip_nonfinite": True, "reorder": False}, 1),
    "reducer-chunks": reducer_step({"scope": "chunk", "chunk": 10, "decay": 0.5, "reorder": False}, 1),
    "local-first": local_step({}, 1),
    "local": local_step({"fragments": 2}, 3),
    "local-delay": local_step({"fragment_sync_delay": 1}, 2),
    "local-applied": local_step({"fragment_sync_delay": 1}, 3),
    "rebuild-reducer": rebuild_reducer,
    "rebuild-local": rebuild_local,
    "load-reducer": load_reducer,
    "load-local": load_local,
    "torch-hook-first": torch_step("hook", 0),
    "torch-hook": torch_step("hook", 1),
    "torch-optimizer-first": torch_step("optimizer", 0),
    "torch-optimizer": torch_step("optimizer", 1),
}


_MAY_TIME_OUT = {name: 2 for name in SCENES if name == "rebuild-local" or "torch" in name}  # seconds


class _Located(Points):
    """Points that say where the last interrupt came."""

    where = ""

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        local = super().trace(frame, event, argument)
        if local is None:
            return None

        def located(frame: Any, event: str, argument: Any) -> Any:
            try:
                return located if local(frame, event, argument) is not None else None
            except InterruptError:
                file = frame.f_code.co_filename.removeprefix(LIBRARY + os.sep)
                self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
                raise

        frame.f_trace = located
        return located


class _Signal(Alarm):
    """A real signal at a random time within a scene's block, of this rank alone."""

    usual = 1e-3  # seconds that the block takes

    def may_raise(self, frame: Any) -> bool:
        """Raise in the library, and where a scene is nothing but a call of it: compiled code has no frames."""
        while frame is not None and frame.f_code.co_filename != __file__:
            if frame.f_code.co_filename.startswith(LIBRARY):
                return True
            frame = frame.f_back
        return frame is not None and frame.f_code.co_name in ("<lambda>", "act", "call")

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Be interrupted within, after so many seconds; not at all: 0."""
        began = time.perf_counter()
        try:
            if seconds:
                self.arm()
                self.set(seconds)
            yield
        finally:
            self.disarm()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not seconds:
                self.usual = time.perf_counter() - began


class _Attack:
    """The rounds of a scene."""

    def __init__(self, name: str, ranks: Ranks) -> None:
        self._name, self._ranks, self._scene = name, ranks, SCENES[name]
        self.alarm = _Signal(InterruptError)
        self.counts, self.failures, self.slowest = Counter[str](), list[str](), 0.0
        self._right = ranks.gather(self._scene(ranks, lambda: self.alarm.within(0)))[ranks.rank]
        self._said = time.monotonic()

    def round(self, what: str, within: Callable[[], Any], where: Callable[[], str]) -> str:
        """Play the scene; return where the interrupt came, "" for nowhere."""
        began, error, found = time.monotonic(), "", None
        try:
            found = self._scene(self._ranks, within)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            print(f"progress: rank {self._ranks.rank}, {what}, {where()}: {error}", flush=True)
        seconds = time.monotonic() - began
        self.slowest = max(self.slowest, seconds)
        if not error and found != self._right:
            error = "other bits than without an interrupt"
        if seconds > _TIMEOUT and self._name != "rebuild-local":
            error = f"a hang of {seconds:.0f} s; {error}"
        place, errors = self._ranks.gather(where())[1], self._ranks.gather(error)
        if self._ranks.rank == 0:
            if any(errors):
                self.failures.append(f"{self._name}, {what}, {place}: {errors}")
            if place:
                self.counts.update([f"interrupts in {self._name}", f"places in {place.partition(':')[0]}"])
            if time.monotonic() - self._said > 30:
                self._said = time.monotonic()
                print(f"progress: {self._name}: {what}", flush=True)
        return "" if any(errors) else place  # the ranks may be apart for good

    def interrupt_at(self, stride: int, at: int) -> None:
        """Interrupt rank 1 at every ``stride``-th place, until there are no more."""
        while True:
            points = _Located(*([at] if self._ranks.rank == 1 else []))
            if not self.round(f"place {at}", lambda p=points: interrupted(points=p), lambda p=points: p.where):
                return
            at += stride

    def signals(self, number: int, seed: int) -> None:
        """Interrupt rank 1 at random times."""
        rng, failed = np.random.default_rng(seed), False
        for i in range(number):
            self.alarm.where = ""
            seconds = float(rng.uniform(0, 1.2 * self.alarm.usual)) if self._ranks.rank == 1 else 0.0
            self.round(f"signal {i}", lambda s=seconds: self._signalled(s), lambda: self.alarm.where)
            failed = bool(self._ranks.gather(self.failures)[0])
            if failed:
                return

    def _signalled(self, seconds: float) -> Any:
        return self.alarm.within(seconds) if seconds else interrupted()


def _attack(name: str, stride: int, at: int, signals: int, seed: int, ranks: Ranks) -> None:
    attack = _Attack(name, ranks)
    if stride:
        attack.interrupt_at(stride, at)
    if not any(ranks.gather(bool(attack.failures))):
        attack.signals(signals, seed)
    say(attack.counts, {"s, the slowest round": attack.slowest}, attack.failures)
    sys.stdout.flush()
    ranks.gather(None)
    os._exit(0) if attack.failures else None


if __name__ == "__main__":
    os.environ["SPARSECOMM_TIMEOUT"] = str(_MAY_TIME_OUT.get(sys.argv[1], _TIMEOUT))
    os.environ["SPARSECOMM_ALONE"] = "1"
    _attack(sys.argv[1], *map(int, sys.argv[2:6]), Ranks(*sys.argv[6:]))
