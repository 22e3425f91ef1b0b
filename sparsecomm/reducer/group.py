"""The ranks that a reducer goes on with, and the buckets that all of them have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from sparsecomm import transport
from sparsecomm.backends import Backends
from sparsecomm.calls.agreement import WordsBroadcast
from sparsecomm.calls.options import Options
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.reducer.bucket import Bucket, Streams
from sparsecomm.reducer.layout import TensorSpec, layout
from sparsecomm.reducer.momentum import MomentumCorrection
from sparsecomm.reducer.rebuild import Member, Rebuilt, gather_members, position, rebuilt_of
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import LoadedState
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.tuning import choice, profile

__all__ = ["Group", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Checked arguments of a `sparsecomm.Reducer`, which describes them.

    Attributes:
        specs: of the tensors, by name.
        chunk: elements of a chunk, for a scope of chunks; otherwise ``None``.
        reorder: also false for a scope in which the order does not matter.
    """

    specs: dict[str, TensorSpec]
    density: Schedule
    options: Options
    correction: MomentumCorrection
    scope: str
    chunk: int | None
    dense_below: int
    bucket_bytes: int | None
    reorder: bool
    skip_nonfinite: bool


class _Arrangement(NamedTuple):
    """Buckets, and what goes with them: see `Group`."""

    label: int
    order: list[str] | None
    bucket_bytes: int
    buckets: list[Bucket]
    by_name: dict[str, Bucket]


class Group:
    """The ranks of a communicator, to which a reducer connects when it first needs them, and its buckets.

    Attributes:
        settings: those of the reducer.
        ranks: ``None`` before.
        queue: on which the reducer's calls are made.
        number: of this reducer among those of the queue.
        buckets: in the order of their calls; none before.
        label: a checksum of what ranks that talk to each other have in common.
        order: names, in the order in which the first step's gradients became ready on rank 0; ``None``: not known.
        bucket_bytes: a bucket with so many is full; ``None`` before, where the costs say it.
        ordering: the call that tells the order, while it is under way.
    """

    queue: CallQueue
    number: int
    label: int

    def __init__(self, comm: transport.Comm, settings: Settings) -> None:
        self.settings, self._comm = settings, comm
        self.ranks: transport.Transport | None = None
        self.buckets: list[Bucket] = []
        self.order: list[str] | None = None
        self.bucket_bytes = settings.bucket_bytes
        self.ordering: tuple[Handle, WordsBroadcast] | None = None
        self._by_name: dict[str, Bucket] = {}
        self._backends = Backends()  # for all but calls

    def connect(self) -> transport.Transport:
        """Return the transport, from the first call on with buckets."""
        ranks = self.ranks
        if ranks is None:
            ranks = transport.of(self._comm)
            number = self._number_on(queue_of(ranks))
            self._attach(self._comm, ranks, self._arranged(number, self.order, self._bucket_bytes_on(ranks)))
        elif self.ordering is not None:
            error = self.finish_ordering()
            if error is not None and not isinstance(error, Exception):
                raise error
        return ranks

    def bucket(self, name: str) -> Bucket:
        """Return the bucket of a tensor; that of a tensor of no elements is empty, and never sent."""
        self.connect()
        return self._by_name[name]

    def plan(self, bucket: Bucket, density: float) -> Plan:
        """Return the plan of a bucket's calls in a step of that density."""
        plans, ranks, options = self.queue.plans, self.connect(), self.settings.options
        plan = plans.find(bucket.key) if bucket.planned == density else None
        if plan is None:
            k, chunks = bucket.selection(density)
            if bucket.dense or density == 1.0:
                options, chunks = options.whole(), None
            backend = self.queue.backends.of(bucket.device)
            plan = Plan(ranks, backend, bucket.accumulator, bucket.shape, bucket.size, k, options, chunks)
            plans.keep(bucket.key, plan)
            bucket.planned = density
        return plan

    # -- buckets ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin with residuals and velocities of zeros."""
        assert self.bucket_bytes is not None
        self._put(self._arranged(self.number, self.order, self.bucket_bytes))

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return copies, in host memory, of the residuals and velocities of all tensors, by name."""
        with on_current_stream(self.buckets):
            residuals, velocities = _kept(self.buckets)
            return self._shaped(residuals), self._shaped(velocities) if self.settings.correction.momentum else {}

    def prepare(self, state: LoadedState) -> Callable[[], None]:
        """Lay out buckets for a state and fill them. Return what puts them in place, which cannot fail."""
        made = self._arranged(self.number, state.order, state.bucket_bytes)
        with on_current_stream(made.buckets):
            for given, kept in zip((state.residuals, state.velocities), _kept(made.buckets), strict=True):
                for name, part in kept.items():
                    part[:] = from_host(given[name], part)
        return lambda: self._put(made)

    def _arranged(self, number: int, order: list[str] | None, bucket_bytes: int, *, keep: bool = False) -> _Arrangement:
        """Return new buckets.

        Args:
            number: of this reducer.
            order: names, as their gradients become ready; ``None``: the reverse order of the tensors.
            bucket_bytes: a bucket with so many is full.
            keep: copy residuals and velocities; otherwise they begin with zeros.
        """
        s = self.settings
        specs = [s.specs[name] for name in (reversed(s.specs) if order is None else order)]
        specs = [spec for spec in specs if spec.size]
        buckets = [
            Bucket([specs[i] for i in members], dense, s.correction, self._backends, s.chunk)
            for members, dense in layout(specs, s.scope, s.dense_below, bucket_bytes)
        ]
        if keep:
            with on_current_stream([*self.buckets, *buckets]):
                for before, after in zip(_kept(self.buckets), _kept(buckets), strict=True):
                    for name in before:
                        after[name][:] = before[name]
        by_name = dict.fromkeys(s.specs, Bucket((), True, s.correction, self._backends))
        by_name |= {spec.name: bucket for bucket in buckets for spec in bucket.tensors}
        told = (number, s.options.op, s.skip_nonfinite, s.scope, s.chunk, astuple(s.correction), s.reorder)
        described = [(bucket.dense, [_described(spec) for spec in bucket.tensors]) for bucket in buckets]
        label = zlib.crc32(repr((*told, s.reorder and order is None, described)).encode())
        return _Arrangement(label, order, bucket_bytes, buckets, by_name)

    def _put(self, made: _Arrangement) -> None:
        """Put buckets in place, with all that belongs to them."""
        self.label, self.order, self.bucket_bytes, self.buckets, self._by_name = made

    def _shaped(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        found = {}
        for name, spec in self.settings.specs.items():
            flat = to_host(parts[name]) if spec.size else np.zeros(0, spec.accumulator.accumulator)
            found[name] = flat.reshape(spec.shape)
        return found

    # -- their order --------------------------------------------------------------------------------------------------

    @property
    def reordering(self) -> bool:
        """Whether the order is still to be found: a call more after the next step."""
        return self.settings.reorder and self.order is None

    def order_call(self, ready: Iterable[str]) -> tuple[Handle, WordsBroadcast]:
        """Return the call that tells all ranks the order of rank 0, to be `ordering` and enqueued.

        Args:
            ready: names, as this rank's gradients became ready; those that it lacks come last.
        """
        numbers, order = self._numbers(), [*ready]
        order += [name for name in reversed(numbers) if name not in set(order)]
        words = WordsBroadcast(self.connect(), [numbers[name] for name in order], zlib.crc32(b"order", self.label) or 1)
        return Handle(self.queue, words), words

    def finish_ordering(self) -> BaseException | None:
        """Wait for the order, if it is asked for, and fill buckets in it. An interrupt of the wait is raised.

        Returns:
            The error of the call, if it failed: the order is found after the next step then.
        """
        if self.ordering is None:
            return None
        handle, told = self.ordering
        try:
            handle.wait()
        except BaseException as error:
            if error is not handle.error:
                raise
            self.ordering = None
            return error
        assert self.bucket_bytes is not None
        names = list(self.settings.specs)
        order = [names[number] for number in told.words]
        self._put(self._arranged(self.number, order, self.bucket_bytes, keep=True))
        self.ordering = None
        return None

    # -- ranks --------------------------------------------------------------------------------------------------------

    def move(self, comm: transport.Comm, step: int, *, joining: bool) -> Rebuilt:
        """Go on with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        Args:
            comm, joining: as there.
            step: this rank's next one.
        """
        ranks, specs, numbers = transport.of(comm), self.settings.specs.values(), self._numbers()
        rank, size = position(self._comm) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        known = None if joining else self.order
        order = [0] * len(numbers) if known is None else [numbers[name] for name in known]
        words = [self._bucket_bytes_on(ranks), known is not None, *order]
        mine = Member(joining, step, *((-1, 0) if joining else (rank, size)), words)
        number = self._number_on(queue_of(ranks))
        label = zlib.crc32(repr((number, [_described(spec) for spec in specs])).encode()) or 1
        members = gather_members(ranks, mine, label)
        stay = [member for member in members if not member.joining]
        _, ordered, *order = next((member for member in stay if member.words[1]), stay[0]).words
        names = list(numbers)
        found = [names[number] for number in order] if ordered else None
        made = self._arranged(number, found, stay[0].words[0], keep=not joining)
        rebuilt = rebuilt_of(members, sum(spec.size for spec in specs))
        self._attach(comm, ranks, made)
        self.ordering = None
        return rebuilt

    def _attach(self, comm: transport.Comm, ranks: transport.Transport, made: _Arrangement) -> None:
        """Make calls on the transport of a communicator from now on, with these buckets."""
        queue = queue_of(ranks)
        self.number = self._number_on(queue)
        queue.users = max(queue.users, self.number + 1)
        self.queue, self._comm, self.ranks = queue, comm, ranks
        self._put(made)

    def _number_on(self, queue: CallQueue) -> int:
        """Return the number that this reducer has, or will have, among those of a queue."""
        return self.number if self.ranks is not None and self.queue is queue else queue.users

    def _bucket_bytes_on(self, ranks: transport.Transport) -> int:
        """Return with how many bytes a bucket is full."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        density = self.settings.density
        costs = profile.used(ranks.library, ranks.size, ranks.num_nodes).costs
        usual = getattr(density, "density", 0.001 if callable(density) else density)
        return choice.bucket_bytes(ranks.size, ranks.num_nodes, usual, costs)

    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.settings.specs)}


def _described(spec: TensorSpec) -> tuple[str, tuple[int, ...], str]:
    return spec.name, spec.shape, spec.accumulator.name


def on_current_stream(buckets: Iterable[Bucket]) -> Streams:
    """Return a context for work with the memory of several buckets on the current stream."""
    return Streams(bucket.on_stream(None) for bucket in buckets)


def _kept(buckets: Iterable[Bucket]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the residuals and velocities of buckets: flat views by name."""
    residuals: dict[str, Array] = {}
    velocities: dict[str, Array] = {}
    for bucket in buckets:
        for kept, parts in zip((residuals, velocities), bucket.state(), strict=True):
            kept.update(parts)
    return residuals, velocities
