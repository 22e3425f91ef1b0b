"""Lives with PyTorch, each in new processes, compared with dense training: see `tests.stress.lives`."""

from __future__ import annotations

import copy
import datetime
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsecomm as sc
from tests.stress.lives import ADAMW, Event, Life, Record, digest_of
from tests.torch import changes
from tests.torch.changes import GROUPS, MOMENTS, SHAPES, WAYS, WEIGHTS

RATES = (0.02, 0.01)  # of the parameter groups
GROUP_TIMEOUT = datetime.timedelta(seconds=30)


class InterruptError(Exception):
    """Raised by the signal handler."""


class Model(torch.nn.ParameterDict):
    """A model whose gradients are its input."""

    __call__ = torch.nn.Module.__call__  # ParameterDict's raises

    def forward(self, gradients: dict[str, Any]) -> Any:
        return torch.stack([(self[n] * g.to(self[n].dtype)).sum().float() for n, g in gradients.items()]).sum()


class Training(changes.Training):
    """A model and its optimizer. ``holder`` has the exchange's state; ``run`` makes forward passes."""

    holder: Any = None
    run: Any
    scheduler: Any = None

    def named_groups(self) -> list[list[str]]:
        names = {id(p): name for name, p in self.model.items()}
        return [[names[id(p)] for p in group["params"]] for group in self.groups]

    def saved(self) -> Any:
        extra = self.holder.state_dict() if self.holder not in (None, self.optimizer) else None
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), extra))

    def load(self, states: Any) -> None:
        weights, optimizer, extra = copy.deepcopy(states)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        if extra is not None:
            self.holder.load_state_dict(extra)

    def advance(self) -> None:
        if self.scheduler is not None and len(self.scheduler.base_lrs) == len(
            self.groups
        ):  # it does not follow other groups
            self.scheduler.step()


class TorchLife:
    """A life on one rank, and its oracle."""

    def __init__(self, life: Life, rank: int) -> None:
        self.life, self.rank, self.exact = life, rank, life.exact
        self.saved: Any = None
        self.make()

    def make(self) -> None:
        front = self.life.front
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self.node = dist.new_subgroups(2)[0] if self.life.P == 4 else "auto"
        self.t, self.oracle = self.training(front), None if front == "diloco" else self.training("")
        self.both = [t for t in (self.oracle, self.t) if t is not None]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if self.life.habits.get("scaler") else None

    def training(self, front: str) -> Training:
        """Return the training of a front end, or of the oracle if ``front`` is empty."""
        life, habits, random = self.life, self.life.habits, torch.Generator().manual_seed(self.life.number)
        model = Model(
            {name: torch.nn.Parameter(torch.randn(shape, generator=random)) for name, shape in SHAPES.items()}
        )
        if habits["frozen"]:
            model["frozen"] = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        names = (["matrix", "kernel"], ["bias", "number"])
        if habits["frozen"] == "named" and front != "register":
            names[1].append("frozen")
        named = [[(name, model[name]) for name in of_group] for of_group in names]
        groups = [{"params": [p for _, p in pairs], "lr": lr} for pairs, lr in zip(named, RATES, strict=True)]
        options = {key: value for key, value in life.options.items() if value is not None}
        options["nodes"] = self.node
        t = Training(front in ADAMW, model, None)
        if front in ADAMW:
            groups = [{**group, "params": pairs} for group, pairs in zip(groups, named, strict=True)]
            optimizer = t.holder = sc.torch.SparseAdamW(groups, overlap=front == "overlap", comm=self.group, **options)
        elif life.front in ADAMW or habits.get("inner") == "AdamW":
            optimizer = torch.optim.AdamW(groups)
        else:
            optimizer = torch.optim.SGD(groups, momentum=habits.get("momentum", 0), weight_decay=0.01)
        t.optimizer, t.run, t.random = optimizer, model, random
        if front == "optimizer":
            flat = [pair for pairs in named for pair in pairs]
            t.optimizer = t.holder = sc.torch.DistributedOptimizer(optimizer, flat, comm=self.group, **options)
        elif front == "register":
            t.run = torch.nn.parallel.DistributedDataParallel(
                model, process_group=self.group, find_unused_parameters=True, bucket_cap_mb=0.0004
            )
            t.holder = sc.torch.register(t.run, **options)
        elif front == "diloco":
            outer = torch.optim.SGD(model.parameters(), 0.7, 0.9, nesterov=True) if habits["outer"] else None
            t.holder = sc.torch.DiLoCo(model, optimizer, outer, comm=self.group, **options)
        if habits["scheduler"] and habits["warm-up"]:
            t.scheduler = torch.optim.lr_scheduler.LambdaLR(t.optimizer, life.factor)
        return t

    # -- events --------------------------------------------------------------------------------------------------------

    def before(self, step: int) -> None:
        """Apply the events before a step."""
        for event in self.life.at(step, rank=self.rank):
            if act := getattr(self, f"on_{event.kind.replace(' ', '_')}", None):
                act(event)
        kinds = {event.kind for event in self.life.at(step)}
        if kinds & {"lone rate", "lone swap", "lone move"} or ("nan" in kinds and self.scaler is None):
            self.exact = False  # after NaN, residuals contain the finite gradients
        warm_up = self.life.habits["warm-up"]
        if warm_up and step in (0, warm_up) and not self.life.habits["scheduler"]:
            for t in self.both:
                for i, group in enumerate(t.groups):
                    group["lr"] = RATES[i % 2] * self.life.factor(step)

    def on_way(self, event: Event) -> None:
        """Apply a change to both runs, if the oracle supports it."""
        name, sample = event.value, self.both[0]
        if name in GROUPS and (len(sample.groups) != 2 or min(map(len, sample.named_groups())) < 2):
            return
        if self.t.sparse and name not in WEIGHTS and name not in GROUPS:
            states = [sample.optimizer.state.get(p, {}) for p in sample.parameters]
            if not all({"step", *MOMENTS} <= state.keys() for state in states):
                return
        if name == "rolled_back" and self.t.snapshot is None:  # it has gone after "dcp"
            return
        if event.kind == "later" and name == "averages_swapped_in_and_out" and "data" not in sample.memo:
            return
        for t in self.both:
            if event.kind == "way" and WAYS[name].whole:
                t.make_whole()
            change = WAYS[name].change if event.kind == "way" else WAYS[name].later
            change(t)

    on_later = on_way

    def on_slow(self, event: Event) -> None:
        time.sleep(event.value)

    def on_freeze(self, event: Event) -> None:
        for t in self.both:
            t.model[event.value].requires_grad_(False).grad = None

    def on_thaw(self, event: Event) -> None:
        for t in self.both:
            t.model[event.value].requires_grad_(True)

    def on_unfreeze(self, event: Event) -> None:
        """Unfreeze the parameter that was frozen at first, and add a group if it has none."""
        if self.t.model["frozen"].requires_grad:
            return
        for t in reversed(self.both):  # if it is refused, nothing changes
            if self.life.habits["frozen"] == "unnamed" and self.life.front != "register":
                t.optimizer.add_param_group({"params": [t.model["frozen"]], "lr": 0.01})
            t.model["frozen"].requires_grad_(True)
        self.exact = self.exact and self.life.front != "register"

    def on_add(self, event: Event) -> None:
        for t in reversed(self.both):
            if "added" not in t.model:
                added = torch.nn.Parameter(torch.ones(9))
                t.optimizer.add_param_group({"params": [added], "lr": 0.01})
                t.model["added"] = added

    def on_snapshot(self, event: Event) -> None:
        for t in self.both:
            t.snapshot = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))

    def on_save(self, event: Event) -> None:
        self.saved = [(t.named_groups(), t.saved()) for t in self.both]

    def on_load(self, event: Event) -> None:
        if [t.named_groups() for t in self.both] != [names for names, _ in self.saved or []]:
            return
        for t, (_, state) in zip(self.both, self.saved, strict=True):
            t.load(state)

    def on_dcp(self, event: Event) -> None:
        """Get the states like trainers, before the backward pass.

        PyTorch makes a step to do so, which changes its optimizers' momentum, so all ranks and the oracle do it.
        """
        for t in self.both:
            t.optimizer.zero_grad()
        if self.t.sparse:
            self.t.optimizer.residuals_apart()
            self.saved = self.t.snapshot = None
        if self.life.habits["frozen"] != "unnamed":
            for t in [self.t] if self.t.sparse else self.both:
                get_optimizer_state_dict(t.model, t.optimizer)

    def set(self, group: dict[str, Any], **values: Any) -> None:
        """Set values of a group on this rank, until the resulting error."""
        self.undo.append(partial(group.update, {key: group[key] for key in values}))
        group.update(values)

    def on_lone_rate(self, event: Event) -> None:
        self.set(self.t.groups[0], lr=self.t.groups[0]["lr"] * 2 + 0.001)

    def on_lone_swap(self, event: Event) -> None:
        first, second = self.t.groups[0], self.t.groups[-1]
        rates = first["lr"], second["lr"]
        self.set(second, lr=rates[0])
        self.set(first, lr=rates[1])

    def on_lone_move(self, event: Event) -> None:
        first, second = self.t.groups[0], self.t.groups[-1]
        if first is second or len(first["params"]) < 2:
            return
        self.undo += [partial(group.update, params=list(group["params"])) for group in (first, second)]
        second["params"].append(first["params"].pop())

    # -- a step --------------------------------------------------------------------------------------------------------

    def gradients(self, step: int, part: int, rank: int, model: Any) -> dict[str, torch.Tensor]:
        shapes = {name: tuple(p.shape) for name, p in model.items() if p.requires_grad}
        return {n: torch.from_numpy(g) for n, g in self.life.gradients(step, part, rank, shapes).items()}

    def step(self, step: int, *, again: bool = False) -> Record:
        """Make a step; ``again``: repeat it after an interrupt, without another interrupt."""
        interrupts = [] if again else self.life.at(step, "interrupt")
        if interrupts:
            self.kept = [(t.named_groups(), t.saved()) for t in self.both]
        self.undo: list[Callable[[], None]] = []
        record = Record(step)
        try:
            self.before(step)
            alarm = next((event.value for event in interrupts if event.rank == self.rank), None)
            self.train(step, alarm, together=self.life.front == "optimizer" and bool(interrupts))
        except Exception as error:
            record.fail(error)
        else:
            if self.oracle is not None:
                self.train_oracle(self.oracle, step)
                record.unlike = self.unlike(self.oracle) if self.exact else 0.0
            record.digest = digest_of(self.compared(step))
        return record

    def compared(self, step: int) -> list[Any]:
        if self.life.front == "diloco":
            if step < self.life.steps - 1:
                return [p.numpy() for p in self.t.holder.global_parameters().values()]
            self.t.holder.finish()
            self.t.holder.write_global_parameters()
        return [p.detach().numpy() for p in self.t.parameters]

    def train(self, step: int, alarm: float | None, *, together: bool) -> None:
        """Make a step. ``together``: all gradients are exchanged in `synchronize`."""
        t, front = self.t, self.life.front
        retry = front == "adamw" or together
        with self.interrupts(None if retry else alarm):
            t.optimizer.zero_grad(set_to_none=self.life.habits["none"])
            for part in range(self.life.habits["passes"]):
                self.backward(step, part, together=together)
        if retry:
            self.retried(step, alarm)
        if front != "adamw":
            with self.interrupts(None if retry else alarm):
                self.update(step)
        t.advance()

    def update(self, step: int) -> None:
        if self.scaler is None or not self.gradients(step, 0, self.rank, self.t.model):  # it needs a batch
            self.t.optimizer.step()
        else:
            self.scaler.step(self.t.optimizer)
            self.scaler.update()

    def retried(self, step: int, alarm: float | None) -> None:
        """Make a step of `SparseAdamW`, or synchronize; after an interrupt continue as documented."""
        optimizer = self.t.optimizer
        number = optimizer.reducer.step
        act = optimizer.synchronize if self.life.front == "optimizer" else partial(self.update, step)
        try:
            with self.interrupts(alarm):
                act()
        except InterruptError as interrupt:
            if isinstance(interrupt.__context__, sc.SparseCommError):  # the step had failed before the interrupt
                raise interrupt.__context__ from None
            waiting = self.life.front == "adamw" and getattr(optimizer._exchange, "exchanged", False)
            if optimizer.reducer.step == number or waiting:
                act()

    def backward(self, step: int, part: int, *, together: bool) -> None:
        life, t = self.life, self.t
        gradients = self.gradients(step, part, self.rank, t.model)
        if not gradients:
            if life.front != "register":
                return
            ranks = range(life.P)  # DDP needs a pass over all parameters that any rank uses
            gradients = {n: g * 0 for rank in ranks for n, g in self.gradients(step, part, rank, t.model).items()}
        last = part == life.habits["passes"] - 1 or life.options.get("backward_passes_per_step", 1) > 1
        within: Any = nullcontext()
        if (together or not last) and life.front in ("overlap", "optimizer", "register"):
            within = (t.run if life.front == "register" else t.optimizer).no_sync()
        with within:
            loss = t.run(gradients)
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
                raise InterruptError

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, delay + 1e-5)
        try:
            yield
        finally:
            active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def train_oracle(self, t: Training, step: int) -> None:
        """Make the step of dense training with the mean of all ranks' gradients."""
        life, totals = self.life, {}
        skipped = {event.rank for event in life.at(step, "nan")}
        if not skipped or self.scaler is not None:  # the scaler skips the step on these ranks only
            for rank, part in product(set(range(life.P)) - skipped, range(life.habits["passes"])):
                for name, value in self.gradients(step, part, rank, t.model).items():
                    totals[name] = totals[name] + value if name in totals else value
            for name, p in t.model.items():
                p.grad = (totals[name] / life.P).to(p.dtype) if name in totals else None
            t.optimizer.step()
        t.advance()

    def unlike(self, oracle: Training) -> float:
        pairs = [(p.detach(), self.t.model[name].detach()) for name, p in oracle.model.items()]
        return max(float((p - other).abs().max() / (p.abs().max() + 1e-3)) for p, other in pairs)

    def restart(self, step: int) -> bool:
        """After an interrupt, restart on a new group from the states before the step, if they still fit."""
        old = self.both
        # After "dcp" the state does not include residuals.
        if any(event.kind == "dcp" and event.step <= step for event in self.life.events):
            return False
        if hasattr(self.t.optimizer, "remove"):
            self.t.optimizer.remove()
        self.make()
        for t, before, (names, states) in zip(self.both, old, self.kept, strict=True):
            if names != t.named_groups():
                return False
            t.load(states)
            t.random, t.snapshot, t.memo = before.random, before.snapshot, before.memo
            for name, p in t.model.items():
                p.requires_grad_(before.model[name].requires_grad)
            if t.scheduler is not None:
                t.scheduler.last_epoch = step
        return True

    def go_on(self, outcomes: list[str]) -> bool:
        """After an error on all ranks, undo its cause, and return whether the life continues."""
        for undo in reversed(self.undo):
            undo()
        self.exact = False
        if self.life.habits["frozen"] and self.t.model["frozen"].requires_grad:
            for t in self.both:
                t.model["frozen"].requires_grad_(False)
        return self.life.front == "adamw" and set(outcomes) <= {"InvalidInputError", "CollectiveMismatchError"}


def be_rank(life: Life, rank: int, pipe: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), life.P)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=life.P, timeout=GROUP_TIMEOUT)
    mine = TorchLife(life, rank)
    for step in range(life.steps):
        pipe.send(mine.step(step))
        if (answer := pipe.recv()) == "restart":
            if not mine.restart(step):
                break
            pipe.send(mine.step(step, again=True))
            answer = pipe.recv()
        if answer is not None and not mine.go_on(answer):
            break
    pipe.send(None)
