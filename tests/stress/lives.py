"""Random lives of trainings: events that programs make between and within steps, on 2 or 3 ranks.

A life has a front end (`SparseAdamW` with and without overlap, `register`, `DistributedOptimizer`, `DiLoCo`, arrays and
JAX), options and a list of events: ranks without batches, warm-ups from learning rate 0, frozen, unfrozen, added and
moved parameters, changes of states and settings, accumulation, snapshots, NaN, interrupts, slow ranks. After each step
the ranks' weights are compared, and at density 1.0 with dense training. An error must be one of the library, and be
raised on all ranks; or the weights must be equal.
"""

from __future__ import annotations

import copy
import ctypes
import datetime
import faulthandler
import hashlib
import logging
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.stress.harness import Numbered, numbered

TIMEOUT = 6.0  # SPARSECOMM_TIMEOUT
DEADLINE = 60.0  # seconds for a step, after which ranks hang
TOLERANCE = 2e-5  # of weights at density 1.0
TORCH = ("adamw", "overlap", "optimizer", "register", "diloco")
SIMULATED = ("arrays", "reducer", "local", "jax adamw", "jax sparsify", "jax tree")
WEIGHTS = (5, 3, 4, 2, 3, 2, 1, 1, 1, 1, 1)  # how often each of these is drawn
INTERRUPTED, IN_WORDS = "ok, interrupted", "ok, an error in words on all ranks"
OK, PARTED, UNLIKE, UNEVEN, HUNG, CRASHED = "ok", "PARTED SILENTLY", "UNLIKE DENSE", "UNEVEN", "HUNG", "CRASHED"

# Ways of `tests.torch.changes` by what they need.
OF_WEIGHTS = (
    "data_replaced", "data_in_one_flat_tensor", "weights_changed_in_place", "weights_loaded",
    "weights_in_shared_memory", "averages_swapped_in_and_out", "transposed_strides", "channels_last",
)  # fmt: skip
OF_GROUPS = (
    "parameters_swapped_between_groups", "one_parameter_moved", "groups_merged", "a_group_split", "groups_reversed",
    "groups_replaced_by_copies",
)  # fmt: skip
OF_ANY_OPTIMIZER = ("states_cleared", "a_new_defaultdict", "other_weight_decay", "no_weight_decay", "maximize")
NOT_HERE = (
    "nothing", "states_made_before_the_first_step", "state_of_a_dense_optimizer_loaded", "a_plain_dict", "setstate",
    "frozen_for_three_steps", "an_empty_state_dict_loaded", "learning_rate_as_a_tensor", "step_as_python_int",
    "a_parameter_replaced_by_another", "rows_removed",
)  # fmt: skip


class InterruptError(Exception):
    """What the handler of a signal raises."""


# -- a life -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happens before or in a step, on one rank or, with ``rank=None``, on all."""

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
        """Return the events of a step, of one kind and those of a rank."""
        found = (event for event in self.events if event.step == step and kind in ("", event.kind))
        return [event for event in found if rank is None or event.rank in (None, rank)]

    @cached_property
    def exact(self) -> bool:
        """Whether dense training is the oracle."""
        dense = self.options.get("density") == 1.0 and not self.options.get("momentum")
        return dense and self.front in ("adamw", "overlap", "optimizer", "register")


def life_of(seed: int, number: int) -> Life:
    choose = random.Random(f"{seed} {number}")
    front, P, steps = choose.choices((*TORCH, *SIMULATED), WEIGHTS)[0], choose.choice((2, 2, 3)), choose.randint(6, 12)
    density = choose.choice((1.0, 0.09 if "adamw" in front or front in ("overlap", "arrays") else 0.2))
    options: dict[str, Any] = {"density": density}
    habits: dict[str, Any] = {"none": choose.random() < 0.7, "passes": choose.choice((1, 1, 1, 2, 3))}
    if front in ("adamw", "overlap"):
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
    habits["warm-up"] = choose.choice((0, 0, 1, 2, 3))
    habits["scheduler"] = choose.random() < 0.5
    habits["frozen"] = front in TORCH and choose.choice(("", "", "named", "unnamed"))
    life = Life(number, P, front, steps, options, habits)
    for _ in range(choose.randint(1, 7)):
        for event in _events(life, choose):
            others = {each.rank for each in life.at(event.step, "no batch")} | {event.rank}
            # Frameworks differ about gradients of zeros that come from no rank.
            if event.kind != "no batch" or len(others) < P or (habits["none"] and front != "register"):
                life.events.append(event)
    return life


def _events(life: Life, choose: random.Random) -> list[Event]:
    """Return one random event, or an event and a later one that undoes it."""
    step, rank, front = choose.randrange(life.steps), choose.randrange(life.P), life.front
    later = min(step + choose.randint(1, 3), life.steps)
    name = choose.choice(("matrix", "bias", "kernel", "number"))
    early = choose.random() < 0.5
    common = ["no batch", "no batch", "no batch", "slow", "unused"]
    if front in SIMULATED:
        kind = choose.choice([*common, "nan", "weights", "reload", "lone rate", "lone swap", "discard"])
    else:
        kinds = [*common, "freeze", "way", "way", "dcp", "state dict"]
        if front in ("adamw", "overlap"):
            kinds += ["way"] * 3 + ["nan", "lone rate", "lone swap", "lone move"]
        if front in ("adamw", "overlap", "optimizer", "diloco"):
            kinds += ["add"]
        if front in ("adamw", "overlap", "optimizer", "register") and not life.habits.get("scaler"):
            kinds += ["interrupt"]  # PyTorch's scaler scales twice after one
        if life.habits["frozen"]:
            kinds += ["unfreeze"]
        kind = choose.choice(kinds)
    if kind == "no batch":  # often while the learning rate is 0
        at = choose.randrange(max(1, life.habits["warm-up"])) if early else step
        return [Event(at, kind, rank)]
    if kind == "slow":
        return [Event(step, kind, rank, round(choose.uniform(0.005, 0.05), 3))]
    if kind == "unused":
        everywhere = life.habits["none"] and front != "diloco" and choose.random() < 0.3
        return [Event(step, kind, None if everywhere else rank, name)]
    if kind == "freeze":
        return [Event(step, kind, value=name), Event(later, "thaw", value=name)]
    if kind == "way":
        from tests.torch.changes import WAYS

        ways = [*OF_WEIGHTS, *OF_GROUPS, *OF_ANY_OPTIMIZER]
        if front in ("adamw", "overlap"):
            ways = [each for each in WAYS if each not in NOT_HERE]
        if front == "register":
            ways = [each for each in ways if each not in ("transposed_strides", "channels_last")]  # plain DDP errs, too
        if front == "diloco":
            ways = [*OF_WEIGHTS, "states_cleared"]
        way = choose.choice(ways)
        events = [Event(step, "way", value=way)]
        if WAYS[way].later is not None:
            events.append(Event(later, "later", value=way))
        return events + ([Event(step // 2, "snapshot")] if way == "rolled_back" else [])
    if kind == "dcp":
        rank = choose.choice((None, None, 0))
        return [Event(step, kind, rank if front in ("adamw", "overlap") else None)]
    if kind == "state dict":
        return [Event(step // 2, "save"), Event(step, "load")]
    if kind == "unfreeze":
        return [Event(step, kind)]
    if kind in ("nan", "lone rate", "lone swap", "lone move"):
        return [Event(step, kind, rank)]
    if kind == "interrupt":
        return [Event(step, kind, rank, round(choose.uniform(0, 0.006), 5))]
    return [Event(step, kind)]


def gradient(number: int, step: int, part: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([number, step, part, rank, *shape])
    return np.asarray(rng.standard_normal(shape) + 0.3, np.float32)


def digest_of(arrays: Any) -> str:
    found = hashlib.sha1()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@dataclass
class Record:
    """A step of one rank."""

    step: int
    error: BaseException | None = None  # pickled as type and text
    digest: str = ""
    unlike: float = 0.0  # the largest difference from dense training, relative to the largest weight
    skipped: tuple[str, ...] = ()  # events that could not happen
    interrupts: int = 0

    def __getstate__(self) -> dict[str, Any]:
        where = traceback.extract_tb(self.error.__traceback__)[-7:] if self.error is not None else []
        frames = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(where))
        kinds = [kind.__name__ for kind in type(self.error).__mro__]
        text = None if self.error is None else (kinds, str(self.error)[:400], frames)
        return {**vars(self), "error": text}


# -- ranks of PyTorch -------------------------------------------------------------------------------------------------


class TorchLife:
    """A life on one rank, beside its oracle."""

    def __init__(self, life: Life, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self.life, self.rank, self.torch, self.dist = life, rank, torch, dist
        self.base_rates = (0.02, 0.01)
        self.frozen: set[str] = set()
        self.saved: Any = None
        self.exact = life.exact
        self.make()
        self.oracle = None if life.front == "diloco" else self.training(None)
        self.skipped: list[str] = []

    def training(self, front: str | None) -> Any:
        """Return a model and its optimizer; ``front=None``: those of the oracle."""
        from tests.torch.changes import SHAPES, Training

        torch, life = self.torch, self.life
        random_numbers = torch.Generator().manual_seed(life.number)
        model = model_class()()
        for name, shape in SHAPES.items():
            model[name] = torch.nn.Parameter(torch.randn(shape, generator=random_numbers))
        if life.habits["frozen"]:
            model["frozen"] = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        of = (["matrix", "kernel"], ["bias", "number"])
        if life.habits["frozen"] == "named" and front != "register":
            of[1].append("frozen")
        pairs = zip(of, self.base_rates, strict=True)
        named = [{"params": [(name, model[name]) for name in names], "lr": lr} for names, lr in pairs]
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in named]
        options = {key: value for key, value in life.options.items() if value is not None}
        adam = life.front in ("adamw", "overlap") or life.habits.get("inner") == "AdamW"
        if adam and front not in ("adamw", "overlap"):
            optimizer: Any = torch.optim.AdamW(groups)
        elif not adam:
            optimizer = torch.optim.SGD(groups, momentum=life.habits.get("momentum", 0), weight_decay=0.01)
        self_run, holder = model, None
        if front in ("adamw", "overlap"):
            optimizer = holder = sc.torch.SparseAdamW(named, overlap=front == "overlap", comm=self.group, **options)
        elif front == "optimizer":
            flat = [pair for group in named for pair in group["params"]]
            optimizer = holder = sc.torch.DistributedOptimizer(optimizer, flat, comm=self.group, **options)
        elif front == "register":
            self_run = torch.nn.parallel.DistributedDataParallel(
                model, process_group=self.group, find_unused_parameters=True, bucket_cap_mb=0.0004
            )
            holder = sc.torch.register(self_run, **options)
        elif front == "diloco":
            outer = None
            if life.habits["outer"]:
                outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            holder = sc.torch.DiLoCo(model, optimizer, outer, comm=self.group, **options)
        t = Training(front in ("adamw", "overlap"), model, optimizer)
        t.random = torch.Generator().manual_seed(life.number)
        t.run, t.holder = self_run, holder  # type: ignore[attr-defined]
        t.scheduler = None  # type: ignore[attr-defined]
        if life.habits["scheduler"] and life.habits["warm-up"]:
            t.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)  # type: ignore[attr-defined]
        return t

    def factor(self, step: int) -> float:
        return 0.0 if step < self.life.habits["warm-up"] else 1.0

    def make(self) -> None:
        timeout = datetime.timedelta(seconds=12)
        self.group = self.dist.new_group(backend="gloo", timeout=timeout)
        self.t = self.training(self.life.front)
        self.scaler = self.torch.amp.GradScaler("cpu", init_scale=1024.0) if self.life.habits.get("scaler") else None

    # -- events --------------------------------------------------------------------------------------------------------

    @property
    def both(self) -> list[Any]:
        return [t for t in (self.oracle, self.t) if t is not None]

    def before(self, step: int) -> None:
        """Let the events before a step happen."""
        self.skipped = []
        for event in self.life.at(step, rank=self.rank):
            if event.kind in ("way", "later"):
                self.change(event)
            elif act := getattr(self, f"on_{event.kind.replace(' ', '_')}", None):
                act(event)
        if any(event.kind.startswith("lone") for event in self.life.at(step)):
            self.exact = False
        if self.life.at(step, "nan") and self.scaler is None:  # the residuals keep the finite gradients
            self.exact = False
        warm_up = self.life.habits["warm-up"]
        if warm_up and step in (0, warm_up) and not self.life.habits["scheduler"]:
            for t in self.both:
                for i, group in enumerate(t.optimizer.param_groups):
                    group["lr"] = self.base_rates[i % 2] * self.factor(step)

    def change(self, event: Event) -> None:
        """Change both trainings in a way, if the oracle has what it takes."""
        from tests.torch.changes import MOMENTS, WAYS

        name, oracle = event.value, self.oracle
        sample = self.t if oracle is None else oracle
        groups = sample.optimizer.param_groups
        if name in OF_GROUPS and (len(groups) != 2 or min(len(g["params"]) for g in groups) < 2):
            return self.skip(event)
        if self.life.front in ("adamw", "overlap") and name not in OF_WEIGHTS and name not in OF_GROUPS:
            states = [sample.optimizer.state.get(p, {}) for p in sample.model.values()]
            if not all({"step", *MOMENTS} <= state.keys() for state in states):
                return self.skip(event)
        if name == "rolled_back" and sample.snapshot is None:
            return self.skip(event)
        for t in self.both:
            way = WAYS[name]
            change = way.change if event.kind == "way" else way.later
            assert change is not None
            if event.kind == "later" and name == "averages_swapped_in_and_out" and "data" not in t.memo:
                return self.skip(event)
            if event.kind == "way" and way.whole:
                t.make_whole()
            change(t)
        return None

    def skip(self, event: Event) -> None:
        self.skipped.append(str(event))

    def on_slow(self, event: Event) -> None:
        time.sleep(event.value)

    def on_freeze(self, event: Event) -> None:
        self.frozen.add(event.value)
        for t in self.both:
            t.model[event.value].requires_grad_(False)
            t.model[event.value].grad = None

    def on_thaw(self, event: Event) -> None:
        self.frozen.discard(event.value)
        for t in self.both:
            t.model[event.value].requires_grad_(True)

    def on_unfreeze(self, event: Event) -> None:
        """Unfreeze what was frozen at first; if it has no group, add one."""
        for t in reversed(self.both):  # refused: then nothing changes
            if self.life.habits["frozen"] == "unnamed" and self.life.front != "register":
                t.optimizer.add_param_group({"params": [t.model["frozen"]], "lr": 0.01})
            t.model["frozen"].requires_grad_(True)
        if self.life.front == "register":
            self.exact = False

    def on_add(self, event: Event) -> None:
        for t in reversed(self.both):
            if "added" not in t.model:
                added = self.torch.nn.Parameter(self.torch.ones(9))
                t.optimizer.add_param_group({"params": [added], "lr": 0.01})
                t.model["added"] = added

    def on_snapshot(self, event: Event) -> None:
        for t in self.both:
            t.snapshot = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))

    def states(self, t: Any) -> Any:
        extra = t.holder.state_dict() if t.holder not in (None, t.optimizer) else None
        return copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict(), extra))

    def load(self, t: Any, states: Any) -> None:
        weights, optimizer, extra = copy.deepcopy(states)
        t.model.load_state_dict(weights)
        t.optimizer.load_state_dict(optimizer)
        if extra is not None:
            t.holder.load_state_dict(extra)

    def on_save(self, event: Event) -> None:
        self.saved = [self.states(t) for t in self.both]

    def on_load(self, event: Event) -> None:
        sizes = [[len(group["params"]) for group in t.optimizer.param_groups] for t in self.both]
        saved = self.saved or []
        if sizes != [[len(group["params"]) for group in state[1]["param_groups"]] for state in saved]:
            self.skip(event)
            return
        for t, state in zip(self.both, saved, strict=True):
            self.load(t, state)

    def on_dcp(self, event: Event) -> None:
        """Get the states as trainers do, before gradients are made.

        PyTorch makes a step for it, which gives its own optimizers momentum. So all ranks and the oracle make it.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        for t in self.both:
            t.optimizer.zero_grad()
        if hasattr(self.t.optimizer, "residuals_apart"):
            self.t.optimizer.residuals_apart()
            self.saved = self.t.snapshot = None
        if self.life.habits["frozen"] != "unnamed":
            for t in [self.t] if self.life.front in ("adamw", "overlap") else self.both:
                get_optimizer_state_dict(t.model, t.optimizer)

    def on_lone_rate(self, event: Event) -> None:
        for group in self.t.optimizer.param_groups[:1]:
            self.undo.append(lambda group=group, lr=group["lr"]: group.update(lr=lr))
            group["lr"] = group["lr"] * 2 + 0.001

    def on_lone_swap(self, event: Event) -> None:
        groups = self.t.optimizer.param_groups[:2]
        rates = [group["lr"] for group in groups]
        for group, lr, mine in zip(groups, reversed(rates), rates, strict=True):
            self.undo.append(lambda group=group, mine=mine: group.update(lr=mine))
            group["lr"] = lr

    def on_lone_move(self, event: Event) -> None:
        groups = self.t.optimizer.param_groups
        before = [list(group["params"]) for group in groups]
        if len(groups) > 1 and len(groups[0]["params"]) > 1:
            groups[1]["params"].append(groups[0]["params"].pop())
            for group, params in zip(groups, before, strict=True):
                self.undo.append(lambda group=group, params=params: group.update(params=params))

    # -- a step --------------------------------------------------------------------------------------------------------

    def given(self, step: int, part: int, rank: int, names: Any) -> dict[str, Any]:
        """Return the gradients of a backward pass of a rank; none if it has no batch."""
        life, torch = self.life, self.torch
        if life.at(step, "no batch") and any(event.rank == rank for event in life.at(step, "no batch")):
            return {}
        unused = {event.value for event in life.at(step, "unused", rank)}
        shapes = {name: tuple(p.shape) for name, p in names.items() if p.requires_grad and name not in unused}
        found = {n: torch.from_numpy(gradient(life.number, step, part, rank, s)) for n, s in shapes.items()}
        if any(event.rank == rank for event in life.at(step, "nan")):
            for each in found.values():
                each.view(-1)[:1] = float("nan")
        return found

    def step(self, step: int, *, again: bool = False) -> Record:
        """Make a step; ``again``: after an interrupt, without another one."""
        self.again, self.interrupted = again, 0
        if self.life.at(step, "interrupt") and not again:
            self.kept = [self.states(t) for t in self.both]
        self.undo: list[Callable[[], None]] = []
        record = Record(step)
        try:
            self.before(step)
            self.train(step)
        except (Exception, KeyboardInterrupt) as error:
            record.error = error
        record.skipped, record.interrupts = tuple(self.skipped), self.interrupted
        if record.error is None:
            if self.oracle is not None:
                self.train_oracle(step)
                record.unlike = self.unlike() if self.exact else 0.0
            record.digest = digest_of(self.compared(step))
        return record

    def compared(self, step: int) -> list[Any]:
        if self.life.front != "diloco":
            return [p.detach().numpy() for p in self.t.model.values()]
        if step == self.life.steps - 1:
            self.t.holder.finish()
            self.t.holder.write_global_parameters()
            return [p.detach().numpy() for p in self.t.model.values()]
        return [p.numpy() for p in self.t.holder.global_parameters().values()]

    def train(self, step: int) -> None:
        life, t = self.life, self.t
        alarms = [] if self.again else life.at(step, "interrupt")
        alarm = next((event.value for event in alarms if event.rank == self.rank), None)
        retry = life.front == "adamw" or (life.front == "optimizer" and bool(alarms))
        with self.interrupts(None if retry else alarm):
            t.optimizer.zero_grad(set_to_none=life.habits["none"])
            for part in range(life.habits["passes"]):
                self.backward(step, part, together=life.front == "optimizer" and bool(alarms))
        finite = True
        if life.front == "register":
            finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in t.model.values())
        if retry:
            self.retried(step, alarm)
        if finite:
            with self.interrupts(None if retry else alarm):
                if life.front == "optimizer" or not retry:
                    self.update(step)
        self.advance(t)

    def advance(self, t: Any) -> None:
        if t.scheduler is not None and len(t.scheduler.base_lrs) == len(t.groups):  # it follows no other groups
            t.scheduler.step()

    def update(self, step: int) -> None:
        if self.scaler is None or not self.given(step, 0, self.rank, self.t.model):  # it refuses a step without batches
            self.t.optimizer.step()
        else:
            self.scaler.step(self.t.optimizer)
            self.scaler.update()

    def retried(self, step: int, alarm: float | None) -> None:
        """Make a step of `SparseAdamW`, or synchronize; after an interrupt go on as the pages say."""
        optimizer = self.t.optimizer
        number = optimizer.reducer.step
        act = optimizer.synchronize if self.life.front == "optimizer" else partial(self.update, step)
        try:
            with self.interrupts(alarm):
                act()
        except InterruptError:
            waiting = self.life.front == "adamw" and getattr(optimizer._exchange, "exchanged", False)
            if optimizer.reducer.step == number or waiting:
                act()

    def backward(self, step: int, part: int, *, together: bool) -> None:
        life, t = self.life, self.t
        given = self.given(step, part, self.rank, t.model)
        if not given and life.front != "register":
            return
        last = part == life.habits["passes"] - 1
        by_passes = life.options.get("backward_passes_per_step", 1) > 1
        apart = together or (not last and not by_passes)
        within = nullcontext()
        if apart and life.front in ("overlap", "optimizer", "register"):
            within = (t.run if life.front == "register" else t.optimizer).no_sync()
        if not given:  # DDP needs a pass
            given = {n: self.torch.zeros(p.shape) for n, p in t.model.items() if p.requires_grad}
        with within:
            loss = t.run(given)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    @contextmanager
    def interrupts(self, delay: float | None) -> Iterator[None]:
        """Let the handler of a signal raise after a while."""
        if delay is None:
            yield
            return
        active = True

        def handler(number: int, frame: object) -> None:
            if active:
                self.interrupted += 1
                raise InterruptError

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, delay + 1e-5)
        try:
            yield
        finally:
            active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def train_oracle(self, step: int) -> None:
        """Make the step of dense training with the mean of all ranks' gradients."""
        life, t = self.life, self.oracle
        if life.front == "optimizer" or life.front == "register":
            skips = life.front == "register" and bool(life.at(step, "nan"))
        else:
            skips = bool(life.at(step, "nan")) and self.scaler is None
        if not skips:
            totals: dict[str, Any] = {}
            for rank in range(life.P):
                if self.scaler is not None and any(event.rank == rank for event in life.at(step, "nan")):
                    continue
                for part in range(life.habits["passes"]):
                    for name, value in self.given(step, part, rank, t.model).items():
                        totals[name] = totals[name] + value if name in totals else value
            for name, p in t.model.items():
                p.grad = (totals[name] / life.P).to(p.dtype) if name in totals else None
            t.optimizer.step()
        self.advance(t)

    def unlike(self) -> float:
        worst = 0.0
        for name, p in self.oracle.model.items():
            size = float(p.abs().max()) + 1e-3
            worst = max(worst, float((p - self.t.model[name]).abs().max()) / size)
        return worst

    def restart(self, step: int) -> bool:
        """After an interrupt, start again on a new group from the states before the step, if they still fit."""
        old = self.both
        if any(event.kind == "dcp" and event.step <= step for event in self.life.events):  # residuals are kept apart
            return False
        if hasattr(self.t.optimizer, "remove"):
            self.t.optimizer.remove()
        self.make()
        self.oracle = self.training(None)
        for t, before, states in zip(self.both, old, self.kept, strict=True):
            saved, ours = states[1]["param_groups"], t.optimizer.param_groups
            if [len(group["params"]) for group in saved] != [len(group["params"]) for group in ours]:
                return False
            self.load(t, states)
            t.random, t.snapshot, t.memo = before.random, before.snapshot, before.memo
            for name, p in t.model.items():
                p.requires_grad_(before.model[name].requires_grad)
            if t.scheduler is not None:
                t.scheduler.last_epoch = step
        return True

    def go_on(self, step: int, outcomes: list[str]) -> bool:
        """After an error on all ranks, undo what was wrong, and return whether the life goes on."""
        for undo in self.undo:
            undo()
        self.exact = False
        if self.life.habits["frozen"] and self.t.model["frozen"].requires_grad:
            for t in self.both:
                t.model["frozen"].requires_grad_(False)
        return self.life.front == "adamw" and set(outcomes) <= {"InvalidInputError", "CollectiveMismatchError"}


_model: list[Any] = []


def model_class() -> Any:
    """Return the class of models whose gradients are what they are given."""
    if not _model:
        import torch

        class Model(torch.nn.ParameterDict):
            __call__ = torch.nn.Module.__call__  # which ParameterDict refuses

            def forward(self, given: dict[str, Any]) -> Any:
                return torch.stack([(self[n] * g.to(self[n].dtype)).sum().float() for n, g in given.items()]).sum()

        _model.append(Model)
    return _model[0]


def be_torch_rank(life: Life, rank: int, pipe: socket.socket, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", life.P)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=life.P, timeout=datetime.timedelta(seconds=12))
    mine = TorchLife(life, rank)
    for step in range(life.steps):
        send(pipe, mine.step(step))
        if (answer := receive(pipe)) == "restart":
            if not mine.restart(step):
                break
            send(pipe, mine.step(step, again=True))
            answer = receive(pipe)
        if answer == "stop" or (answer is not None and not mine.go_on(step, answer)):
            break
    send(pipe, None)


def send(pipe: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.sendall(len(data).to_bytes(8, "little") + data)


def receive(pipe: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := pipe.recv(count - len(data))):
                raise EOFError
            data += more
        return data

    return pickle.loads(exactly(int.from_bytes(exactly(8), "little")))


# -- simulated ranks --------------------------------------------------------------------------------------------------

ARRAYS = {"matrix": (12, 9), "bias": (9,), "number": ()}


def weights() -> dict[str, np.ndarray]:
    return {name: np.asarray(np.random.default_rng(3).standard_normal(s), np.float32) for name, s in ARRAYS.items()}


class ArrayLife:
    """A life of arrays on a simulated rank. Subclasses have the front ends."""

    def __init__(self, life: Life, transport: Any) -> None:
        self.life, self.transport, self.rank, self.lone = life, transport, transport.rank, set()
        self.weights = weights()
        self.make()

    def rates(self, step: int) -> dict[str, float]:
        factor = 0.0 if step < self.life.habits["warm-up"] else 1.0
        return {"lr": 0.02 * factor * (2 if "lone rate" in self.lone else 1), "decay": 0.01}

    def decays(self) -> dict[str, float]:
        first, second = (0.1, 0.3)[:: -1 if "lone swap" in self.lone else 1]
        return {"matrix": first, "bias": second, "number": 0.0}

    def given(self, step: int) -> dict[str, np.ndarray]:
        life = self.life
        if any(event.rank == self.rank for event in life.at(step, "no batch")):
            return {}
        unused = {event.value for event in life.at(step, "unused", self.rank)}
        found = {n: gradient(life.number, step, 0, self.rank, s) for n, s in ARRAYS.items() if n not in unused}
        if any(event.rank == self.rank for event in life.at(step, "nan")):
            for each in found.values():
                each.reshape(-1)[:1] = np.nan
        return found

    def run(self) -> list[Record]:
        records = []
        for step in range(self.life.steps):
            record = Record(step)
            self.lone = {event.kind for event in self.life.at(step, rank=self.rank) if event.kind.startswith("lone")}
            try:
                if self.life.at(step, "weights"):
                    self.change_weights()
                if self.life.at(step, "reload"):
                    self.reload()
                if self.life.at(step, "discard"):
                    self.discard()
                self.step(step)
                record.digest = digest_of(self.weights.values())
            except Exception as error:
                record.error = error
            records.append(record)
            if record.error is not None:
                break
        return records

    def change_weights(self) -> None:
        for value in self.weights.values():
            value *= np.float32(0.5)

    def reload(self) -> None:
        state = copy.deepcopy(self.it.state_dict())
        self.make()
        self.it.load_state_dict(state)

    def discard(self) -> None:
        self.it.discard()


class OfArrays(ArrayLife):
    def make(self) -> None:
        self.it = sc.SparseAdamW(
            self.weights, 0.02, density=self.life.options["density"], comm=self.transport, weight_decay=self.decays()
        )

    def step(self, step: int) -> None:
        self.it.lr = self.rates(step)["lr"]
        self.it.weight_decay = self.decays()
        self.it.step(self.given(step))


class OfReducer(ArrayLife):
    def make(self) -> None:
        self.it = sc.Reducer(
            weights(), self.life.options["density"], comm=self.transport, op="mean", dense_below=0, skip_nonfinite=True
        )

    def step(self, step: int) -> None:
        given, outs = self.given(step), {name: np.zeros(shape, np.float32) for name, shape in ARRAYS.items()}
        for name, out in outs.items():
            self.it.push(name, given.get(name), out)
        done = self.it.wait()
        for name, out in outs.items():
            if done.usable and name not in done.without_gradient:
                self.weights[name] -= np.float32(0.1) * out


class OfLocalSteps(ArrayLife):
    def make(self) -> None:
        self.local = {name: value.copy() for name, value in self.weights.items()}
        density = self.life.options["density"]
        self.it = sc.LocalSteps(self.local, density, comm=self.transport, sync_every=2, fragments=2)

    def step(self, step: int) -> None:
        for name, g in self.given(step).items():
            self.local[name] -= np.float32(self.rates(step)["lr"]) * np.nan_to_num(g)
        self.it.step(self.local)
        self.weights = {name: np.array(value) for name, value in self.it.global_parameters().items()}

    def change_weights(self) -> None:
        for value in self.local.values():
            value *= np.float32(0.5)

    def reload(self) -> None:
        state, local = copy.deepcopy(self.it.state_dict()), self.local
        self.weights = {name: value.copy() for name, value in local.items()}
        self.make()
        self.it.load_state_dict(state)

    def discard(self) -> None:
        pass


class OfJax(ArrayLife):
    """`sparse_adamw`, `sparsify` and `allreduce_tree`, eagerly."""

    def make(self) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import sparsecomm.jax as sj

        self.jax, self.jnp, self.optax, self.sj = jax, jnp, optax, sj
        self.params = {name: jnp.asarray(value) for name, value in self.weights.items()}
        if not hasattr(self, "state"):
            self.optimizer()
            self.state = self.it.init(self.params) if self.it is not None else sj.init_residuals(self.params)

    def optimizer(self, step: int = 0) -> None:
        """Make the transformation with the settings of a step."""
        density, rates, comm = self.life.options["density"], self.rates(step), self.transport
        if self.life.front == "jax adamw":
            names = ("matrix", "bias") if "lone swap" not in self.lone else ("matrix", "number")
            mask = {name: name in names for name in self.params}
            self.it: Any = self.sj.sparse_adamw(rates["lr"], weight_decay=0.1, mask=mask, density=density, comm=comm)
        elif self.life.front == "jax sparsify":
            self.it = self.sj.sparsify(density, dense_below=0, comm=comm)
        else:
            self.it = None

    def step(self, step: int) -> None:
        given = self.given(step)
        tree = {name: self.jnp.asarray(given.get(name, np.zeros(s, np.float32))) for name, s in ARRAYS.items()}
        self.optimizer(step)
        if self.it is None:
            if step % 4 == 3:  # another tree, with residuals of its own
                other = {"a": tree["matrix"], "b": [tree["bias"]]}
                zeros = self.sj.init_residuals(other)
                self.sj.allreduce_tree(other, self.life.options["density"], residuals=zeros, comm=self.transport)
            means, kept = self.sj.allreduce_tree(
                tree, self.life.options["density"], residuals=self.state, dense_below=0, comm=self.transport
            )
            if all(bool(self.jnp.isfinite(each).all()) for each in means.values()):
                self.params = {name: p - 0.1 * means[name] for name, p in self.params.items()}
                self.state = kept
        else:
            changes, self.state = self.it.update(tree, self.state, self.params)
            scale = 0.1 if self.life.front == "jax sparsify" else 1.0
            scaled = {name: change * (-scale if scale != 1 else 1) for name, change in changes.items()}
            self.params = self.optax.apply_updates(self.params, scaled)
        self.weights = {name: np.asarray(p) for name, p in self.params.items()}

    def change_weights(self) -> None:
        self.params = {name: p * 0.5 for name, p in self.params.items()}

    def reload(self) -> None:
        self.state = self.jax.tree.map(lambda leaf: self.jnp.array(np.asarray(leaf)), self.state)

    def discard(self) -> None:
        pass


def be_simulated_ranks(pipe: socket.socket) -> None:
    """Live the lives that come; JAX keeps what it has compiled."""
    from sparsecomm.transport import simulated

    kinds = {"arrays": OfArrays, "reducer": OfReducer, "local": OfLocalSteps}
    while (life := receive(pipe)) is not None:
        kind = kinds.get(life.front, OfJax)
        results = simulated.run(life.P, lambda transport, life=life, kind=kind: kind(life, transport).run(), catch=True)
        send(pipe, [result.value if result.error is None else [Record(-1, result.error)] for result in results])


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdict_of(life: Life, records: list[Record], *, again: bool = False) -> tuple[str, str]:
    """Return the verdict about a step, given the records of all ranks, with reasons.

    ``again``: the step is made again after an interrupt.
    """
    step = max(record.step for record in records)
    errors = [record.error for record in records]
    interrupted = bool(life.at(step, "interrupt")) and not again
    said = "; ".join(
        f"rank {rank}: {'ok' if error is None else f'{error[0][0]}: {error[1]} ({error[2]})'}"
        for rank, error in enumerate(errors)
    )
    if any(error is not None for error in errors):
        stopped = interrupted and any(error is not None and "InterruptError" in error[0] for error in errors)
        if stopped:
            return INTERRUPTED, said
        if any(error is not None and "SparseCommError" not in error[0] for error in errors):
            return CRASHED, said
        if any(error is None for error in errors) or any("TimeoutError" in error[0] for error in errors if error):
            return UNEVEN, said
        return IN_WORDS, said
    if len({record.digest for record in records}) > 1:
        return PARTED, "weights differ between ranks"
    worst = max(record.unlike for record in records)
    if not worst <= TOLERANCE:
        return UNLIKE, f"weights are {worst:.1e} away from those of dense training"
    return OK, ""


class Ranks:
    """Forked processes: P ranks of PyTorch that live a life, or one with simulated ranks that lives many."""

    def __init__(self, life: Life) -> None:
        self.life, self.folder = life, tempfile.mkdtemp(prefix="sparsecomm-life-")
        self.deadline = DEADLINE if life.front in TORCH else 4 * DEADLINE
        self.counts: Counter[str] = Counter()
        self.pipes: list[socket.socket] = []
        self.pids: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(life.P if life.front in TORCH else 1):
            mine, its = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                self.be_child(rank, its)
            its.close()
            self.pipes.append(mine)
            self.pids.append(pid)

    def be_child(self, rank: int, pipe: socket.socket) -> None:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
            log = os.open(f"{self.folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
            if self.life.front in TORCH:
                be_torch_rank(self.life, rank, pipe, self.folder)
            else:
                be_simulated_ranks(pipe)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def log(self, rank: int) -> str:
        file = Path(f"{self.folder}/log{rank}")
        return file.read_text(errors="replace")[-2500:] if file.exists() else ""

    def receive(self) -> list[Any] | tuple[str, str]:
        """Return a message of each rank; a verdict if one does not come."""
        found: list[Any] = []
        end = time.monotonic() + self.deadline
        for rank, pipe in enumerate(self.pipes):
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                for pid in self.pids:
                    os.kill(pid, signal.SIGUSR2)
                time.sleep(0.3)
                return HUNG, "\n".join(f"rank {i}: {self.log(i)[:900]}" for i in range(len(self.pids)))
            try:
                found.append(receive(pipe))
            except (EOFError, ConnectionResetError):
                status = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
                self.pids.pop(rank)
                return CRASHED, f"rank {rank} ended with status {status}:\n{self.log(rank)}"
        return found

    def live(self) -> tuple[str, str, int]:
        """Return verdict, reasons, and the last step."""
        last = OK, ""
        if self.life.front not in TORCH:
            send(self.pipes[0], self.life)
            answer = self.receive()
            if isinstance(answer, tuple):
                return *answer, -1
            return self.judge(answer[0])
        step, restarted = 0, -1
        while True:
            answer = self.receive()
            if isinstance(answer, tuple):
                return *answer, step
            if answer[0] is None:  # the ranks have ended
                return *last, step
            step = answer[0].step
            self.counts["interrupts"] += sum(record.interrupts for record in answer)
            self.counts["events that could not happen"] += len(answer[0].skipped)
            verdict = verdict_of(self.life, answer, again=restarted == step)
            if verdict[0] != OK:
                last = verdict
            reply: Any = None
            if verdict[0] == INTERRUPTED:
                reply, restarted = "restart", step
            elif verdict[0] == IN_WORDS:
                reply = [record.error[0][0] for record in answer]
            elif verdict[0] != OK:
                return *verdict, step
            for pipe in self.pipes:
                send(pipe, reply)

    def judge(self, ranks: list[list[Record]]) -> tuple[str, str, int]:
        """Judge what simulated ranks have recorded."""
        for step in range(self.life.steps):
            records = [records[step] if step < len(records) else records[-1] for records in ranks]
            verdict = verdict_of(self.life, records)
            if len({record.step for record in records}) > 1 and verdict[0].startswith("ok"):
                verdict = UNEVEN, verdict[1]
            if verdict[0] != OK:
                return *verdict, step
        return OK, "", self.life.steps

    def end(self) -> None:
        deadline = time.monotonic() + 1
        for pid in self.pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Lives(Numbered):
    options = (
        *numbered("lives", 500),
        ("without", "", "kinds of events to leave out, separated by commas, such as 'lone swap,add'"),
        ("show", False, "print the verdict about each life"),
    )
    unit, chunk = "lives", 50
    simulated: Ranks | None = None  # for lives on simulated ranks

    def run(self) -> None:
        os.environ |= {"SPARSECOMM_TIMEOUT": str(TIMEOUT), "SPARSECOMM_PROFILE": "none", "JAX_PLATFORMS": "cpu"}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        super().run()

    def check(self, number: int) -> None:
        for name in ("torch.distributed.checkpoint.state_dict", "sparsecomm.torch", "tests.torch.changes"):
            import_module(name)  # in the process that forks
        life = self.case = life_of(self.report.seed, number)
        life.events = [event for event in life.events if event.kind not in self.given.without.split(",")]
        ranks = self.simulated if life.front in SIMULATED else None
        if ranks is None:
            ranks = Ranks(life)
        ranks.life = life
        verdict = ""
        try:
            verdict, why, step = ranks.live()
            counts, ranks.counts = ranks.counts, Counter()
        finally:
            if life.front in TORCH or verdict in ("", HUNG, CRASHED):
                ranks.end()
                ranks = None
        if life.front in SIMULATED:
            self.simulated = ranks
        self.counts += counts
        self.counts[verdict] += 1
        self.counts[f"lives of {life.front}"] += 1
        self.counts["events"] += len(life.events)
        if self.given.show:
            print(f"{verdict}: {life}; ended at step {step}: {why[:300]}\n", end="", file=sys.stderr, flush=True)
        if not verdict.startswith("ok"):
            raise AssertionError(f"{verdict} in step {step}: {why}")
