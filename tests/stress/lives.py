"""Random lives of training jobs: events between and within steps, on 2, 3 or 4 ranks; 4 ranks are two nodes.

A life has a front end of PyTorch (`SparseAdamW` with and without overlap, `register`, `DistributedOptimizer`,
`DiLoCo`), options and a list of events: ranks without batches, warm-ups from learning rate 0, frozen, unfrozen, added
and moved parameters, changes of states and settings, accumulation, snapshots, NaN, interrupts, slow ranks. After each
step the ranks' weights are compared, and at density 1.0 also with dense training. Either all ranks raise errors of the
library, or the weights must be equal.

`tests.stress.lives_torch` has the ranks, which are forked processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ENVIRONMENT = {
    "SPARSECOMM_PROFILE": "none", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
}  # fmt: skip
DEADLINE = 180.0  # seconds after which a step is considered to hang
TOLERANCE = 2e-5  # of weights, at density 1.0
ADAMW = ("adamw", "overlap")
TORCH = (*ADAMW, "optimizer", "register", "diloco")
FREQUENCIES = (5, 3, 4, 2, 3)  # relative frequencies of the front ends
NAMES = ("matrix", "bias", "kernel", "number")  # of parameters
INTERRUPTED, IN_WORDS = "ok, interrupted", "ok, an error in words on all ranks"
OK, PARTED, UNLIKE, UNEVEN, HUNG, CRASHED = "ok", "PARTED SILENTLY", "UNLIKE DENSE", "UNEVEN", "HUNG", "CRASHED"

# Changes from `tests.torch.changes`.
OF_ANY_OPTIMIZER = ("states_cleared", "a_new_defaultdict", "no_weight_decay", "maximize")
NOT_HERE = (
    "nothing", "states_made_before_the_first_step", "state_of_a_dense_optimizer_loaded", "setstate",
    "frozen_for_two_steps", "an_empty_state_dict_loaded", "learning_rate_as_a_tensor", "step_as_python_int",
    "a_parameter_replaced_by_another", "rows_removed",
)  # fmt: skip


# -- a life -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """An event before or in a step, on one rank or, with ``rank=None``, on all."""

    step: int
    kind: str
    rank: int | None = None
    value: Any = None

    def __str__(self) -> str:
        value = "" if self.value is None else f" {self.value}"
        return f"{self.step}: {self.kind}{value}{'' if self.rank is None else f' on rank {self.rank}'}"


@dataclass
class Life:
    number: int
    P: int
    front: str
    steps: int
    options: dict[str, Any]  # of the front end
    habits: dict[str, Any]  # of the program
    events: list[Event] = field(default_factory=list)

    def __str__(self) -> str:
        events = "; ".join(map(str, sorted(self.events, key=lambda event: event.step)))
        return f"life {self.number}: {self.front}, P={self.P}, {self.options}, {self.habits}; {events or 'no events'}"

    def at(self, step: int, kind: str = "", rank: int | None = None) -> list[Event]:
        """Return the events of a step, optionally of one kind or rank."""
        events = (event for event in self.events if event.step == step and kind in ("", event.kind))
        return [event for event in events if rank is None or event.rank in (None, rank)]

    @property
    def timeout(self) -> int:
        """Return the seconds for which ranks wait for each other; nobody may answer after an interrupt."""
        return 15 if any(event.kind == "interrupt" for event in self.events) else 20

    @property
    def exact(self) -> bool:
        """Whether results must equal dense training."""
        dense = self.options.get("density") == 1.0 and not self.options.get("momentum")
        return dense and self.front != "diloco"

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate."""
        return 0.0 if step < self.habits["warm-up"] else 1.0

    def gradients(self, step: int, part: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Return a rank's gradients of a backward pass; none without a batch."""
        if self.at(step, "no batch", rank):
            return {}
        unused, arrays = {event.value for event in self.at(step, "unused", rank)}, {}
        for name, shape in shapes.items():
            if name not in unused:
                rng = np.random.default_rng([self.number, step, part, rank, *shape])
                arrays[name] = np.asarray(rng.standard_normal(shape) + 0.3, np.float32)
                if self.at(step, "nan", rank):
                    arrays[name].reshape(-1)[:1] = np.nan
        return arrays


def life_of(seed: int, number: int) -> Life:
    choose = random.Random(f"{seed} {number}")
    front, P = choose.choices(TORCH, FREQUENCIES)[0], choose.choice((2, 2, 3, 4, 4))
    density = choose.choice((1.0, 0.09 if front in ADAMW else 0.2))
    options: dict[str, Any] = {"density": density}
    habits: dict[str, Any] = {"none": choose.random() < 0.7, "passes": choose.choice((1, 1, 1, 2, 3))}
    if front in ADAMW:
        options |= {"bucket_bytes": choose.choice((None, 600)), "dense_steps": choose.choice((0, 0, 2))}
        habits["scaler"] = front == "adamw" and choose.random() < 0.2
    elif front in ("optimizer", "register"):
        options |= {"scope": choose.choice(("model", "tensor")), "momentum": choose.choice((0, 0, 0.5))}
        options |= {"dense_below": choose.choice((0, 30)), "bucket_bytes": choose.choice((None, 600))}
        habits["momentum"] = 0 if options["momentum"] else choose.choice((0, 0.9))
        if front == "optimizer" and choose.random() < 0.2:
            options["backward_passes_per_step"] = habits["passes"] = 2
    elif front == "diloco":
        options |= {"sync_every": choose.choice((2, 3)), "fragments": choose.choice((1, 2))}
        options["fragment_sync_delay"] = choose.choice((0, 0, 1))
        habits |= {"outer": choose.random() < 0.5, "inner": choose.choice(("SGD", "AdamW"))}
    habits |= {"warm-up": choose.choice((0, 0, 1, 2, 3)), "scheduler": choose.random() < 0.5}
    habits["frozen"] = choose.choice(("", "", "named", "unnamed"))
    life = Life(number, P, front, choose.randint(6, 12), options, habits)
    for _ in range(choose.randint(1, 7)):
        for event in _events(life, choose):
            life.events.append(event)
            used = {name for rank in range(P) for name in life.gradients(event.step, 0, rank, dict.fromkeys(NAMES, ()))}
            # Frameworks treat zero gradients from no rank differently.
            if (len(used) < len(NAMES) and not habits["none"]) or (not used and front == "register"):
                life.events.pop()
    return life


def _kinds(life: Life) -> list[str]:
    """Return the possible kinds of events, more frequent ones several times."""
    front, kinds = life.front, ["no batch", "no batch", "no batch", "slow", "unused"]
    kinds += ["freeze", "way", "way", "dcp", "load"]
    if front in ADAMW:
        kinds += ["way"] * 3 + ["nan", "lone rate", "lone swap", "lone move"]
    if front != "register":
        kinds += ["add"]
    if front != "diloco" and not life.habits.get("scaler"):
        kinds += ["interrupt"]  # PyTorch's scaler scales twice after an interrupt
    return kinds + ["unfreeze"] * bool(life.habits["frozen"])


def _events(life: Life, choose: random.Random) -> list[Event]:
    """Return a random event, with the events that must precede or undo it."""
    kind, front = choose.choice(_kinds(life)), life.front
    step, rank = choose.randrange(life.steps), choose.randrange(life.P)
    later = min(step + choose.randint(1, 3), life.steps)
    name = choose.choice(NAMES)
    if kind == "no batch":  # often while the learning rate is 0
        warm_up = choose.randrange(max(1, life.habits["warm-up"]))
        return [Event(choose.choice((step, warm_up)), kind, rank)]
    if kind == "slow":
        return [Event(step, kind, rank, round(choose.uniform(0.005, 0.05), 3))]
    if kind == "interrupt":
        return [Event(step, kind, rank, round(choose.uniform(0, 0.006), 5))]
    if kind == "unused":
        everywhere = life.habits["none"] and front != "diloco" and choose.random() < 0.3
        return [Event(step, kind, None if everywhere else rank, name)]
    if kind == "freeze":
        return [Event(step, kind, value=name), Event(later, "thaw", value=name)]
    if kind == "load":
        return [Event(step // 2, "save"), Event(step, kind)]
    if kind == "dcp":
        return [Event(step, kind, choose.choice((None, None, 0)) if front in ADAMW else None)]
    if kind == "way":
        from tests.torch.changes import GROUPS, WAYS, WEIGHTS

        ways = [*WEIGHTS, *GROUPS, *OF_ANY_OPTIMIZER]
        if front in ADAMW:
            ways = [way for way in WAYS if way not in NOT_HERE]
        if front == "register":
            # Plain DDP fails with these, too.
            ways = [way for way in ways if way != "channels_last"]
        if front == "diloco":
            ways = [*WEIGHTS, "states_cleared"]
        way = choose.choice(ways)
        undone = [Event(later, "later", value=way)] if WAYS[way].later is not None else []
        return [Event(step // 2, "snapshot")] * (way == "rolled_back") + [Event(step, kind, value=way), *undone]
    return [Event(step, kind, rank if kind == "nan" or kind.startswith("lone") else None)]


# -- verdicts ---------------------------------------------------------------------------------------------------------


def digest_of(arrays: Any) -> str:
    sha = hashlib.sha1()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


@dataclass
class Record:
    """A step of one rank."""

    step: int
    error: tuple[list[str], str] | None = None  # (names of its class and base classes, text)
    digest: str = ""
    unlike: float = 0.0  # the largest difference from dense training, relative to the largest weight

    def fail(self, error: BaseException) -> None:
        frames = reversed(traceback.extract_tb(error.__traceback__)[-7:])
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        self.error = [kind.__name__ for kind in type(error).__mro__], f"{str(error)[:400]} ({where})"


def verdict_of(life: Life, records: list[Record], *, again: bool = False) -> tuple[str, str]:
    """Return a verdict on a step and the reasons, from the records of all ranks.

    ``again``: the step is made again after an interrupt.
    """
    errors = [record.error for record in records if record.error is not None]
    if errors:
        texts = ["ok" if record.error is None else f"{record.error[0][0]}: {record.error[1]}" for record in records]
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        expected = not again and life.at(max(record.step for record in records), "interrupt")
        if expected and any("InterruptError" in kinds for kinds, _ in errors):
            return INTERRUPTED, said
        if any("SparseCommError" not in kinds for kinds, _ in errors):
            return CRASHED, said
        if len(errors) < len(records) or any("TimeoutError" in kinds for kinds, _ in errors):
            return UNEVEN, said
        return IN_WORDS, said
    if len({record.digest for record in records}) > 1:
        return PARTED, "weights differ between ranks"
    worst = max(record.unlike for record in records)
    if not worst <= TOLERANCE:
        return UNLIKE, f"weights are {worst:.1e} away from those of dense training"
    return OK, ""


class Ranks:
    """P forked processes that train."""

    def __init__(self, life: Life) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sparsecomm-life-"))
        self.pipes, self.processes, fork = [], [], multiprocessing.get_context("fork")
        for rank in range(life.P):
            mine, child_end = fork.Pipe()
            process = fork.Process(target=self.be_child, args=(life, rank, child_end), daemon=True)
            process.start()
            child_end.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def be_child(self, life: Life, rank: int, pipe: Any) -> None:
        status = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
            log = os.open(self.folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
            import_module("tests.stress.lives_torch").be_rank(life, rank, pipe, self.folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)

    def receive(self) -> list[Any] | tuple[str, str]:
        """Return each rank's next message, or a verdict if one is missing."""
        messages: list[Any] = []
        end = time.monotonic() + DEADLINE
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                for process in self.processes:
                    os.kill(process.pid, signal.SIGUSR2)
                time.sleep(0.3)
                return HUNG, "\n".join(f"rank {i}: {self.log(i)[:900]}" for i in range(len(self.pipes)))
            try:
                messages.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self.processes[rank].join()
                return CRASHED, f"rank {rank} ended with status {self.processes[rank].exitcode}:\n{self.log(rank)}"
        return messages

    def log(self, rank: int) -> str:
        file = self.folder / f"log{rank}"
        return file.read_text(errors="replace")[-2500:] if file.exists() else ""

    def live(self, life: Life) -> tuple[str, str, int]:
        """Return verdict, reasons, and the last step."""
        last, step, restarted = (OK, ""), 0, -1
        while True:
            answer = self.receive()
            if isinstance(answer, tuple):
                return *answer, step
            if answer[0] is None:  # the ranks have ended
                return *last, step
            step = answer[0].step
            verdict = verdict_of(life, answer, again=restarted == step)
            reply: Any = None
            if verdict[0] == INTERRUPTED:
                reply, restarted = "restart", step
            elif verdict[0] == IN_WORDS:
                reply = [record.error[0][0] for record in answer]
            elif verdict[0] != OK:
                return *verdict, step
            last = last if verdict[0] == OK else verdict
            for pipe in self.pipes:
                pipe.send(reply)

    def end(self) -> None:
        for process in self.processes:
            process.join(1)
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def check(seed: int, number: int) -> str:
    """Play a life, and return its front end and the verdict."""
    life = life_of(seed, number)
    os.environ |= ENVIRONMENT | {"SPARSECOMM_TIMEOUT": str(life.timeout)}
    for module in ("torch._dynamo", "tests.stress.lives_torch"):  # in the parent, before it forks
        import_module(module)
    ranks = Ranks(life)
    try:
        verdict, why, step = ranks.live(life)
    finally:
        ranks.end()
    if not verdict.startswith(OK):
        raise AssertionError(f"{verdict} in step {step}: {why}\n  in {life}")
    return f"{life.front}: {verdict}"
