"""Interrupts of one of two real ranks, or of four in two nodes, over MPI and over gloo.

Rank 1 is interrupted at the n-th place in the library's Python code, for n = 0, stride, 2 stride ... to the last, and
by real signals at random times, which also hit waits in the gate of `sparsecomm.signals`. Then all ranks continue as in
docs/reference/errors.md, and results must equal those without an interrupt bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import FrameType

import numpy as np

from tests.interrupts import LIBRARY, InterruptError, Points, interrupted
from tests.stress import scenes
from tests.stress.harness import Attack, Ranks
from tests.stress.scenes import SCENES, Within

HANG = 20  # seconds that a round may take


class Signal:
    """A real signal to this rank at a random time within a scene's block. Its handler raises once."""

    usual = 1e-3  # usual seconds of the block

    def __init__(self) -> None:
        self.where, self._armed = "", False  # place where the handler raised
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self._armed and frame is not None and self._may_raise(frame):
            self._armed = False
            self.where = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_code.co_name}"
            raise InterruptError
        if self._armed:  # keep trying
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Return whether to raise here: in the library, or in its direct caller, where deferred signals arrive."""
        while frame is not None and frame.f_code.co_filename != scenes.__file__:
            if frame.f_code.co_filename.startswith(LIBRARY):
                return True
            frame = frame.f_back
        return frame is not None and frame.f_code.co_name in ("<lambda>", "call")

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Interrupt the block after ``seconds``; 0: not at all."""
        began, self.where = time.perf_counter(), ""
        try:
            self._armed = bool(seconds)
            signal.setitimer(signal.ITIMER_REAL, seconds and max(seconds, 1e-6))
            yield
            if not seconds:
                self.usual = time.perf_counter() - began
        finally:
            self._armed = False  # the signal may still arrive here
            signal.setitimer(signal.ITIMER_REAL, 0)


class Interrupts(Attack):
    options = (
        ("stride", 1, "every so many places; 0: none"),
        ("signals", 200, "at random times, in each scene"),
        ("over", ("mpi", "gloo"), "torch-hook over gloo only"),
        ("scenes", tuple(SCENES), ""),
    )

    def run(self) -> None:
        for over, scene in product(self.arguments.over, self.arguments.scenes):
            if over == "gloo" or not scene.startswith("torch-hook"):  # DistributedDataParallel needs a process group
                self.start_ranks(4 if scene.startswith("nodes") else 2, 3600, over, scenes=scene)

    @property
    def timeout(self) -> float:  # type: ignore[override]
        """The timeout, short if a rank may wait for one that does not come."""
        return 2 if self.arguments.scenes[0].startswith(("torch", "rebuild-LocalSteps")) else HANG

    def on_rank(self, ranks: Ranks) -> None:
        """Interrupt one scene at places and by signals."""
        os.environ["SPARSECOMM_ALONE"] = "1"
        (self._name,) = self.arguments.scenes
        self._ranks, alarm = ranks, Signal()
        self._right = ranks.gather(SCENES[self._name](ranks, lambda: alarm.within(0)))[ranks.rank]
        stride, rng = self.arguments.stride, np.random.default_rng(self.report.seed)
        at, place = self.report.seed % max(1, stride), "yes"
        while stride and place:
            points = Points(*([at] if ranks.rank == 1 else []))
            place = self._round(f"place {at}", lambda p=points: interrupted(points=p), lambda p=points: p.where)
            at += stride
        for i in range(self.arguments.signals):
            if any(ranks.gather(bool(self.report.failures))):  # the ranks may be out of step
                break
            seconds = float(rng.uniform(0, 1.2 * alarm.usual)) if ranks.rank == 1 else 0.0
            within: Within = (lambda s=seconds: alarm.within(s)) if seconds else interrupted
            self._round(f"signal {i}", within, lambda: alarm.where)

    def _round(self, what: str, within: Within, where: Callable[[], str]) -> str:
        """Play the scene; return the place of the interrupt, or "" without one or after a failure."""
        began, error, outcome = time.monotonic(), "", None
        try:
            outcome = SCENES[self._name](self._ranks, within)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            text = f"progress: rank {self._ranks.rank}, {what}, {where()}: {error}"
            print(text, file=sys.stderr, flush=True)  # in case the other rank is not informed
        seconds = time.monotonic() - began
        self.report.measure("s, the slowest round", seconds)
        if not error and outcome != self._right:
            error = "other bits than without an interrupt"
        if seconds > HANG and self._name != "rebuild-LocalSteps":
            error = f"a hang of {seconds:.0f} s; {error}"
        place, errors = self._ranks.gather(where())[1], self._ranks.gather(error)
        if self._ranks.rank == 0:
            if any(errors):
                self.fail(f"{self._name}, {what}, {place}: {errors}")
            if place:
                self.counts.update([f"interrupts in {self._name}", f"places in {place.partition(':')[0]}"])
        self.progress(f"{self._name}: {what}")
        return "" if any(errors) else place
