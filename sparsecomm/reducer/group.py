"""The ranks that a reducer goes on with, and the buckets that all of them have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping

from sparsecomm import transport
from sparsecomm.calls.collective import WordsBroadcast
from sparsecomm.calls.queue import CallQueue, queue_of
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

    @property
    def reordering(self) -> bool:
        """Whether the order is still to be found: a call more after the next step."""
        return self._reorder and self.order is None

    def connect(self) -> transport.Transport:
        """Return the transport, from the first call on with buckets."""
        ranks = self._attach() if self.ranks is None else self.ranks
        if not self._laid_out:  # or it was interrupted
            self.lay_out(keep=False)
        return ranks

    def bucket(self, name: str) -> Bucket:
        """Return the bucket of a tensor."""
        self.connect()
        return self.buckets.of(name)

    def lay_out(self, *, keep: bool) -> None:
        """Distribute the tensors over buckets, in the order that is known; ``keep`` residuals and velocities."""
        assert self.bucket_bytes is not None
        self.buckets.rebuild(self.order, self.bucket_bytes, keep=keep)
        self.label = self._label(self.reordering, self.buckets)
        self._laid_out = True

    def prepare(self, state: LoadedState) -> Callable[[], None]:
        """Lay out buckets for a state and fill them. Return what puts them in place, which cannot fail."""
        made = self.buckets.arranged(state.order, state.bucket_bytes)
        made.restore(state.residuals, state.velocities)
        label = self._label(self._reorder and state.order is None, made)

        def commit() -> None:
            self.order, self.bucket_bytes, self.label = state.order, state.bucket_bytes, label
            self.buckets.take(made)
            self._laid_out = True

        return commit

    def _label(self, reordering: bool, buckets: Buckets) -> int:
        return zlib.crc32(repr((self.number, *self._settings, reordering, buckets.describe())).encode())

    def agree_on_order(self, became_ready: Iterable[str]) -> None:
        """Fill buckets in the order in which rank 0's gradients became ready; what had none comes last."""
        ranks, numbers = self.connect(), self._numbers()
        order = [*became_ready]
        order += [name for name in reversed(numbers) if name not in set(order)]
        words = WordsBroadcast(ranks, [numbers[name] for name in order], zlib.crc32(b"order", self.label) or 1)
        self.queue.submit(words).wait()
        names = list(numbers)
        self.order = [names[number] for number in words.words]
        self.lay_out(keep=True)

    def move(self, comm: transport.Comm, step: int, *, joining: bool) -> Rebuilt:
        """Go on with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        Args:
            comm, joining: as there.
            step: this rank's next one.
        """
        if self.ranks is None:
            self._was = position(self._comm)
        elif self._was is None:
            self._was = self.ranks.rank, self.ranks.size
        self._comm = comm
        ranks = self._attach()
        if not self._laid_out:
            self.lay_out(keep=False)
        numbers = self._numbers()
        order = () if joining or self.order is None else tuple(numbers[name] for name in self.order)
        rank, size = (-1, 0) if joining else self._was
        assert self.bucket_bytes is not None
        mine = Member(joining, step, rank, size, self.bucket_bytes, order)
        tensors = [(spec.name, spec.shape, spec.accumulator.name) for spec in self._specs.values()]
        elements = sum(spec.size for spec in self._specs.values())
        label = zlib.crc32(repr((self.number, tensors)).encode()) or 1
        found, rebuilt = agree(ranks, self.queue, mine, len(tensors), elements, label)
        names = list(numbers)
        self._was = None
        self.bucket_bytes = found.bucket_bytes
        self.order = [names[number] for number in found.order] or None
        self.lay_out(keep=not joining)
        return rebuilt

    def _attach(self) -> transport.Transport:
        """Make calls on the transport of the communicator from now on."""
        ranks = transport.of(self._comm)
        queue = queue_of(ranks)
        if self._numbered is not queue:  # no signal comes between these four
            self.number, queue.users = queue.users, queue.users + 1
            self.queue = self._numbered = queue
        if self.bucket_bytes is None:
            costs = profile.used(ranks.library, ranks.size, ranks.num_nodes).costs
            usual = getattr(self._density, "density", 0.001 if callable(self._density) else self._density)
            self.bucket_bytes = choice.bucket_bytes(ranks.size, ranks.num_nodes, usual, costs)
        self.ranks = ranks
        return ranks

    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._specs)}
