"""The ranks that a reducer goes on with, and the buckets that all of them have in common."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple

from sparsecomm import transport
from sparsecomm.backends import Backends
from sparsecomm.calls.agreement import WordsBroadcast
from sparsecomm.calls.measurement import costs_for_steps, costs_matter
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.reducer.bucket import Bucket, Streams, TensorSpec
from sparsecomm.reducer.layout import layout
from sparsecomm.reducer.options import DENSITY, FILLED, Settings
from sparsecomm.reducer.rebuild import Members, Rebuilt
from sparsecomm.reducer.schedule import final_density
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.tuning import choice, profile

__all__ = ["Group"]


class Arrangement:
    """The tensors of a reducer in buckets: all that changes when they are laid out anew. So one assignment does that.

    Attributes:
        order: names, in the order in which the first step's gradients became ready on rank 0; ``None``: not known.
        bucket_bytes: a bucket with so many is full.
        buckets: in the order of their calls.
        by_name: the bucket of each tensor. That of a tensor of no elements is never sent.
        label: a checksum of what ranks that talk to each other have in common.
    """

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        settings: Settings,
        backends: Backends,
        number: int,
        order: list[str] | None,
        bucket_bytes: int,
    ) -> None:
        """Lay out buckets of zeros.

        Args:
            specs, settings: of the reducer.
            backends: for all but calls.
            number: of the reducer, see `Group`.
            order, bucket_bytes: see above. Without an order it is the reverse one of the tensors.
        """
        s, self.order, self.bucket_bytes = settings, order, bucket_bytes
        self._specs = specs
        sent = [spec for spec in map(specs.__getitem__, reversed(specs) if order is None else order) if spec.size]
        members = layout(sent, s.scope, s.dense_below, bucket_bytes)
        self.buckets = [Bucket([sent[i] for i in positions], dense, s, backends) for positions, dense in members]
        never = [Bucket([spec], True, s, backends) for spec in specs.values() if not spec.size]
        self.by_name = {spec.name: bucket for bucket in [*self.buckets, *never] for spec in bucket.tensors}
        told = (number, s.options.op, s.skip_nonfinite, s.scope, s.chunk, astuple(s.correction), s.reorder)
        described = [(bucket.dense, [_described(spec) for spec in bucket.tensors]) for bucket in self.buckets]
        self.label = zlib.crc32(repr((*told, s.reorder and order is None, described)).encode())

    def on_current_stream(self) -> Streams:
        """Return a context for work with the memory of all buckets on the current stream."""
        return Streams(bucket.on_stream(None) for bucket in self.buckets)

    def forget_calls(self) -> None:
        """Have the next calls begin without what algorithms keep from those before."""
        for bucket in self.buckets:
            if bucket.latest is not None:
                bucket.latest.comm.cache.clear()

    def fill(self, *kept: Mapping[str, Array]) -> None:
        """Set residuals and velocities to flat arrays by name, which are in host memory or on the tensors' devices."""
        with self.on_current_stream():
            for ours, given in zip(self.kept(), kept, strict=True):
                for name, part in ours.items():
                    part[:] = from_host(given[name], part)

    def to_host(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return copies of residuals and velocities in host memory, by name, in the shapes of the tensors."""
        with self.on_current_stream():
            residuals, velocities = self.kept()
            return self._shaped(residuals), self._shaped(velocities)

    def kept(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return residuals and velocities, by name: flat views. Without momentum there are no velocities."""
        each = [(name, self.by_name[name]) for name in self._specs]
        return (
            {name: bucket.residuals[name] for name, bucket in each},
            {name: bucket.velocities[name] for name, bucket in each if bucket.velocities},
        )

    def _shaped(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {name: to_host(array).reshape(self._specs[name].shape) for name, array in arrays.items()}


class Group:
    """The ranks of a communicator, to which a reducer connects when it first needs them, and its buckets.

    Attributes:
        specs, settings: those of the reducer.
        ranks: ``None`` before; then there are no queue, number and buckets either.
        queue: on which the reducer's calls are made.
        number: of this reducer among those of the queue.
        now: the buckets.
        ordering: the call that tells the order, while it is under way.
    """

    queue: CallQueue
    number: int
    now: Arrangement

    def __init__(self, comm: transport.Comm, specs: dict[str, TensorSpec], settings: Settings) -> None:
        self.specs, self.settings, self._comm = specs, settings, comm
        self.transport: transport.Transport | None = None
        self.ordering: tuple[Handle, WordsBroadcast] | None = None
        self._backends = Backends()  # for all but calls
        self._names = list(specs)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def connect(self) -> transport.Transport:
        """Make buckets, and return the transport."""
        ranks = transport.transport_of(self._comm)
        self._attach(self._comm, ranks, None, self._bucket_bytes_on(ranks), keep=False)
        return ranks

    def have_costs(self, density: float) -> None:
        """Have the costs measured by which plans choose, if steps of that density lack one. Collective."""
        if self.transport is None or all(bucket.planned(self.queue, density) for bucket in self.now.buckets):
            return
        ranks, buckets = self.transport, self.now.buckets
        if any(costs_matter(ranks, self.settings.call_options(each.accumulator.name)) for each in buckets):
            costs_for_steps(ranks)

    def arranged(self, order: list[str] | None, bucket_bytes: int) -> Arrangement:
        """Return new buckets of zeros, to be filled and put in the place of those that there are."""
        return Arrangement(self.specs, self.settings, self._backends, self.number, order, bucket_bytes)

    # -- their order --------------------------------------------------------------------------------------------------

    def order_call(self, ready: Iterable[str]) -> tuple[Handle, WordsBroadcast]:
        """Return the call that tells all ranks the order of rank 0, to be `ordering` and enqueued.

        Args:
            ready: names, as this rank's gradients became ready; those that it lacks come last.
        """
        ranks, order = self.transport, [*ready]
        assert ranks is not None
        order += [name for name in reversed(self._names) if name not in set(order)]
        label = zlib.crc32(b"order", self.now.label) or 1
        words = WordsBroadcast(ranks, [self._numbers[name] for name in order], label)
        return Handle(self.queue, words), words

    def reorder(self, words: list[int] | None) -> None:
        """Fill buckets in the order that `ordering` has told; ``None``: it has failed."""
        if words is not None:
            made = self.arranged([self._names[number] for number in words], self.now.bucket_bytes)
            with self.now.on_current_stream():
                made.fill(*self.now.kept())
            self.now = made
        self.ordering = None

    # -- ranks --------------------------------------------------------------------------------------------------------

    def move(self, comm: transport.Comm, step: int, *, joining: bool) -> Rebuilt:
        """Go on with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        Args:
            comm, joining: as there.
            step: this rank's next one.
        """
        ranks, specs = transport.transport_of(comm), self.specs.values()
        keep = not joining and self.transport is not None
        known = self.now.order if keep else None
        order = [0] * len(specs) if known is None else [self._numbers[name] for name in known]
        words = [0 if self.transport is None else self.now.bucket_bytes, known is not None, *order]
        number = self._number_on(queue_of(ranks))
        label = zlib.crc32(repr((number, [_described(spec) for spec in specs])).encode()) or 1
        members = Members(ranks, self.transport or self._comm, joining, step, words, label)
        _, ordered, *order = next((each.words for each in members.stay if each.words[1]), members.stay[0].words)
        found = [self._names[number] for number in order] if ordered else None
        told = next((member.words[0] for member in members.stay if member.words[0]), 0)
        self._attach(comm, ranks, found, told or self._bucket_bytes_on(ranks), keep=keep)
        return members.rebuilt(sum(spec.size for spec in specs))

    def _attach(
        self,
        comm: transport.Comm,
        transport: transport.Transport,
        order: list[str] | None,
        bucket_bytes: int,
        *,
        keep: bool,
    ) -> None:
        """Make calls on the transport of a communicator from now on, with new buckets.

        ``keep``: they take the residuals and velocities of those that there are.
        """
        queue = queue_of(transport)
        number = self._number_on(queue)
        made = Arrangement(self.specs, self.settings, self._backends, number, order, bucket_bytes)
        if keep:
            with self.now.on_current_stream():
                made.fill(*self.now.kept())
        queue.users = max(queue.users, number + 1)
        self.queue, self.number, self.now = queue, number, made
        self._comm, self.transport, self.ordering = comm, transport, None

    def _number_on(self, queue: CallQueue) -> int:
        """Return the number that this reducer has, or will have, among those of a queue."""
        return self.number if self.transport is not None and self.queue is queue else queue.users

    def _bucket_bytes_on(self, transport: transport.Transport) -> int:
        """Return with how many bytes a bucket is full where no rank has buckets yet."""
        if self.settings.bucket_bytes is not None:
            return self.settings.bucket_bytes
        used = costs_for_steps(transport) if self.settings.scope in FILLED else None  # otherwise it does not matter
        costs = profile.DEFAULT if used is None else used.costs
        usual, options = final_density(self.settings.density, DENSITY.density), Options()
        if self.settings.options.algorithm == "auto":
            options = self.settings.call_options("float32")
        return choice.bucket_bytes(transport.size, transport.num_nodes, usual, costs, options.algorithm, options.wire)


def _described(spec: TensorSpec) -> tuple[str, tuple[int, ...], str]:
    return spec.name, spec.shape, spec.accumulator.name
