"""The ranks that a reducer goes on with, and the buckets that all of them have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial

from sparsecomm import transport
from sparsecomm.calls.agreement import WordsBroadcast
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.buckets import Buckets
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.rebuild import Member, Rebuilt, agree, position
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import LoadedState
from sparsecomm.tuning import choice, profile

__all__ = ["Group"]


class Group:
    """The ranks of a communicator, to which a reducer connects when it first needs them.

    Attributes:
        buckets: empty before.
        ranks: ``None`` before.
        queue: on which the reducer's calls are made.
        number: of this reducer among those of the queue.
        label: a checksum of what ranks that talk to each other have in common.
        order: names, in the order in which the first step's gradients became ready on rank 0; ``None``: not known.
        bucket_bytes: a bucket with so many is full; ``None`` before, where the costs say it.
        became_ready: names, as the gradients of the last step became ready; ``None``: no order is to be found now.
    """

    queue: CallQueue
    number: int
    label: int

    def __init__(
        self,
        comm: transport.Comm,
        specs: Mapping[str, TensorSpec],
        buckets: Buckets,
        *,
        density: Schedule,
        bucket_bytes: int | None,
        reorder: bool,
        settings: tuple[object, ...],
    ) -> None:
        """Prepare a group.

        Args:
            comm: as in `sparsecomm.sparse_allreduce`.
            specs: of the tensors, in their order.
            buckets: for them.
            density: of a usual call, by which the size of buckets is chosen.
            bucket_bytes: as above.
            reorder: fill buckets anew after the first step.
            settings: what all ranks must have set alike.
        """
        self.buckets, self.bucket_bytes = buckets, bucket_bytes
        self.ranks: transport.Transport | None = None
        self.order: list[str] | None = None
        self._comm, self._specs, self._density = comm, specs, density
        self._reorder, self._settings = reorder, settings
        self._was: tuple[int, int] | None = None  # rank and size before a `move` that has not ended
        self._numbered: CallQueue | None = None  # the queue that `number` is of
        self._laid_out = False
        self.became_ready: list[str] | None = None
        self._ordering: tuple[Handle, WordsBroadcast] | None = None  # the call that tells the order

    @property
    def reordering(self) -> bool:
        """Whether the order is still to be found: a call more after the next step."""
        return self._reorder and self.order is None

    def connect(self) -> transport.Transport:
        """Return the transport, from the first call on with buckets."""
        ranks = self._attach(self._comm) if self.ranks is None else self.ranks
        if not self._laid_out:  # or it was interrupted
            self.lay_out(self.order, keep=False)
        if self.became_ready is not None:
            self._agree_on_order()
        return ranks

    def bucket(self, name: str) -> Bucket:
        """Return the bucket of a tensor."""
        self.connect()
        return self.buckets.of(name)

    def lay_out(self, order: list[str] | None, *, bucket_bytes: int | None = None, keep: bool) -> None:
        """Distribute the tensors over buckets, in this order.

        Args:
            order: names; ``None``: it is not known.
            bucket_bytes: a bucket with so many is full; ``None``: as it was.
            keep: residuals and velocities.
        """
        nbytes = self.bucket_bytes if bucket_bytes is None else bucket_bytes
        assert nbytes is not None
        self._put(order, nbytes, self.buckets.arranged(order, nbytes, keep=keep))

    def prepare(self, state: LoadedState) -> Callable[[], None]:
        """Lay out buckets for a state and fill them. Return what puts them in place, which cannot fail."""
        made = self.buckets.arranged(state.order, state.bucket_bytes)
        made.restore(state.residuals, state.velocities)
        return partial(self._put, state.order, state.bucket_bytes, made)

    def _put(self, order: list[str] | None, bucket_bytes: int, buckets: Buckets) -> None:
        """Put buckets in place, with all that belongs to them."""
        label = self._label(self._reorder and order is None, buckets)
        self.order, self.bucket_bytes, self.buckets = order, bucket_bytes, buckets  # no signal comes from here on
        self.label, self._laid_out = label, True

    def _label(self, reordering: bool, buckets: Buckets) -> int:
        return zlib.crc32(repr((self.number, *self._settings, reordering, buckets.describe())).encode())

    def agree_on_order(self) -> None:
        """Fill buckets in the order of rank 0's `became_ready`; what it lacks comes last. Collective, if it is due.

        If an interrupt comes before this is done, `connect` goes on with it.
        """
        if (error := self._agree_on_order()) is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame

    def _agree_on_order(self) -> BaseException | None:
        """Return the error of the call if it failed: the order is found after the next step then."""
        if self.became_ready is None:
            return None
        if self._ordering is None:
            ranks, numbers = self._attach(self._comm), self._numbers()
            order = [*self.became_ready]
            order += [name for name in reversed(numbers) if name not in set(order)]
            told = WordsBroadcast(ranks, [numbers[name] for name in order], zlib.crc32(b"order", self.label) or 1)
            self._ordering = Handle(self.queue, told), told
        handle, words = self._ordering
        self.queue.enqueue(handle)
        try:
            handle.wait()
        except BaseException as error:
            if error is not handle.error:
                raise  # the wait was interrupted
            self._ordering = self.became_ready = None
            return error
        names = list(self._specs)
        self.lay_out([names[number] for number in words.words], keep=True)
        self._ordering = self.became_ready = None
        return None

    def move(self, comm: transport.Comm, step: int, *, joining: bool) -> Rebuilt:
        """Go on with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        Args:
            comm, joining: as there.
            step: this rank's next one.
        """
        if self._was is None:
            self._was = position(self._comm) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        ranks = self._attach(comm)
        self._ordering = self.became_ready = None
        if not self._laid_out:
            self.lay_out(self.order, keep=False)
        numbers = self._numbers()
        known = () if joining or self.order is None else tuple(numbers[name] for name in self.order)
        rank, size = (-1, 0) if joining else self._was
        assert self.bucket_bytes is not None
        mine = Member(joining, step, rank, size, self.bucket_bytes, known)
        tensors = [(spec.name, spec.shape, spec.accumulator.name) for spec in self._specs.values()]
        elements = sum(spec.size for spec in self._specs.values())
        label = zlib.crc32(repr((self.number, tensors)).encode()) or 1
        found, rebuilt = agree(ranks, self.queue, mine, len(tensors), elements, label)
        names = list(numbers)
        order = [names[number] for number in found.order] or None
        self.lay_out(order, bucket_bytes=found.bucket_bytes, keep=not joining)
        self._was = None
        return rebuilt

    def _attach(self, comm: transport.Comm) -> transport.Transport:
        """Make calls on the transport of a communicator from now on."""
        ranks = transport.of(comm)
        queue, nbytes = queue_of(ranks), self.bucket_bytes
        if nbytes is None:
            costs = profile.used(ranks.library, ranks.size, ranks.num_nodes).costs
            usual = getattr(self._density, "density", 0.001 if callable(self._density) else self._density)
            nbytes = choice.bucket_bytes(ranks.size, ranks.num_nodes, usual, costs)
        if self._numbered is not queue:  # no signal comes from here on
            self.number, queue.users = queue.users, queue.users + 1
        self.queue = self._numbered = queue
        self._comm, self.ranks, self.bucket_bytes = comm, ranks, nbytes
        return ranks

    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._specs)}
