"""`Connection`: a reducer's communicator and buckets. `Members`: the ranks that continue on a new communicator."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.backends import Backends
from sparsecomm.backends.base import on_streams
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.calls.measurement import costs_for_steps
from sparsecomm.calls.plan import Options
from sparsecomm.calls.queue import CallQueue, queue_of
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.options import DENSITY, SIZED_SCOPES, Settings, described, final_density
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import CPU, Device, TensorSpec, from_host, to_host
from sparsecomm.transport import Comm, Transport, transport_of
from sparsecomm.transport.control import format_ranks
from sparsecomm.tuning import choice, profile


def layout(
    tensors: Sequence[TensorSpec], scope: str, dense_below: int, bucket_bytes: int = sys.maxsize
) -> list[tuple[list[int], bool]]:
    """Assign tensors to buckets.

    Tensors of fewer than ``dense_below`` elements share dense buckets. The other tensors get a bucket each with scope
    "tensor", and share one with "model"; with "bucket" and "chunk" a bucket is complete when it holds
    ``bucket_bytes``. Tensors of different devices or accumulator dtypes never share a bucket.

    Return for each bucket positions in ``tensors`` and whether it is dense, in the order in which buckets become
    complete if gradients become ready in the order of ``tensors``. Dense buckets come last.
    """
    buckets: list[tuple[list[int], bool]] = []
    open_buckets: dict[tuple[Device, DType, bool], list[int]] = {}
    nbytes: dict[tuple[Device, DType, bool], int] = {}
    for i, spec in enumerate(tensors):
        dense = spec.size < dense_below
        key = spec.device, spec.accumulator, dense
        open_buckets.setdefault(key, []).append(i)
        nbytes[key] = nbytes.get(key, 0) + spec.nbytes
        full = scope == "tensor" or (scope in SIZED_SCOPES and nbytes[key] >= bucket_bytes)
        if full and not dense:
            buckets.append((open_buckets.pop(key), dense))
            del nbytes[key]
    buckets += [(positions, dense) for (_, _, dense), positions in open_buckets.items()]
    return sorted(buckets, key=lambda bucket: (bucket[1], bucket[0][-1]))


class Buckets:
    """The buckets of a reducer. A reducer that needs other buckets replaces this object."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        settings: Settings,
        backends: Backends,
        number: int,
        bucket_bytes: int,
        num_ranks: int,
    ) -> None:
        """Make buckets with residuals of zeros. ``backends`` and ``number``: see `Connection`."""
        s, self._specs = settings, specs
        self.bucket_bytes = bucket_bytes  # the size at which a bucket is complete
        sent = [spec for spec in reversed(specs.values()) if spec.size]
        self.all = [  # in the order of their calls
            Bucket([sent[i] for i in positions], dense, s, backends, num_ranks)
            for positions, dense in layout(sent, s.scope, s.dense_below, bucket_bytes)
        ]
        empty = [Bucket([spec], True, s, backends, num_ranks) for spec in specs.values() if not spec.size]
        # Includes tensors without elements, which are never sent.
        self.by_name = {spec.name: bucket for bucket in [*self.all, *empty] for spec in bucket.tensors}
        common = {
            "op": s.options.op, "scope": s.scope, "chunk": s.chunk, "momentum": s.momentum, "masking": s.masking,
            "clip": s.clip, "decay": s.decay, "skip_nonfinite": s.skip_nonfinite,
        }  # fmt: skip
        tensors = [(bucket.dense, [_described(spec) for spec in bucket.tensors]) for bucket in self.all]
        self.label = Label(  # everything that must be equal on the ranks
            (number, common, tensors),
            lambda: [
                ("call", f"a step of Reducer {number}"),
                *described(s.density),
                ("algorithm", s.options.algorithm),
                ("wire", s.options.wire),
                *common.items(),
                *(_described(spec) for spec in specs.values() if spec.size),
                ("dense_below", s.dense_below),
                ("bucket_bytes", bucket_bytes),
            ],
        )

    def on_current_stream(self) -> AbstractContextManager[None]:
        """Return a context for work with the memory of all buckets on the current stream."""
        return on_streams(bucket.on_stream(None) for bucket in self.all)

    def arrays(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Return flat views of residuals, velocities and exponents by name. A reducer may lack the latter two."""
        buckets = [(name, self.by_name[name]) for name in self._specs]
        return (
            {name: bucket.residuals[name] for name, bucket in buckets},
            {name: bucket.velocities[name] for name, bucket in buckets if bucket.velocities},
            {name: bucket.exponents_of[name] for name, bucket in buckets if bucket.exponents_of},
        )

    def fill(self, *arrays: Mapping[str, Array], units_lag: bool) -> None:
        """Set the arrays of `arrays` to flat arrays by name, in host memory or on the tensors' devices."""
        for bucket in self.all:
            bucket.units_lag = units_lag
        with self.on_current_stream():
            for ours, theirs in zip(self.arrays(), arrays, strict=True):
                for name, view in ours.items():
                    view[:] = from_host(theirs[name], view)

    def to_host(self) -> list[dict[str, Array]]:
        """Return copies of the arrays of `arrays` by name, in host memory and in the shapes of the tensors."""
        with self.on_current_stream():
            return [
                {name: to_host(array).reshape(self._specs[name].shape) for name, array in arrays.items()}
                for arrays in self.arrays()
            ]


class Connection:
    """A reducer's connection to the ranks of a communicator, made when the reducer first needs them."""

    # After `connect` or `move`:
    queue: CallQueue  # makes the reducer's calls
    number: int  # of this reducer among the reducers that use the queue
    buckets: Buckets

    def __init__(self, comm: Comm, specs: dict[str, TensorSpec], settings: Settings) -> None:
        self.specs, self.settings, self._comm = specs, settings, comm
        self.transport: Transport | None = None  # None before `connect` or `move`
        self.backends = Backends()  # for all work outside calls

    def connect(self) -> Transport:
        """Make the connection and the buckets, and return the transport."""
        transport = transport_of(self._comm)
        self._attach(self._comm, transport, self._bucket_bytes_on(transport), keep=False)
        return transport

    def new_buckets(self, bucket_bytes: int) -> Buckets:
        """Return new buckets of zeros, to replace `buckets`."""
        assert self.transport is not None
        size = self.transport.size
        return Buckets(self.specs, self.settings, self.backends, self.number, bucket_bytes, size)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def move(self, comm: Comm, step: int, *, joining: bool) -> Rebuilt:
        """Continue with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        ``step``: this rank's next step.
        """
        transport, specs = transport_of(comm), self.specs.values()
        keep = not joining and self.transport is not None
        words = [0 if self.transport is None else self.buckets.bucket_bytes]
        number = self._number_on(queue_of(transport))
        label = Label.of(("call", f"rebuild() of Reducer {number}"), *map(_described, specs))
        members = Members(transport, self.transport or self._comm, joining, step, words, label)
        bucket_bytes = next((member.words[0] for member in members.stay if member.words[0]), 0)
        self._attach(comm, transport, bucket_bytes or self._bucket_bytes_on(transport), keep=keep)
        return members.rebuilt(sum(spec.size for spec in specs))

    def _attach(self, comm: Comm, transport: Transport, bucket_bytes: int, *, keep: bool) -> None:
        """Use ``transport``, which is that of ``comm``, for all later calls, with new buckets.

        ``keep``: copy residuals and velocities from the old buckets.
        """
        queue = queue_of(transport)
        number = self._number_on(queue)
        buckets = Buckets(self.specs, self.settings, self.backends, number, bucket_bytes, transport.size)
        if keep:
            with self.buckets.on_current_stream():
                lag = any(bucket.units_lag for bucket in self.buckets.all)
                buckets.fill(*self.buckets.arrays(), units_lag=lag)
        queue.users = max(queue.users, number + 1)
        self.queue, self.number, self.buckets = queue, number, buckets
        self._comm, self.transport = comm, transport

    def _number_on(self, queue: CallQueue) -> int:
        """Return the number that this reducer has, or would get, on a queue."""
        return self.number if self.transport is not None and self.queue is queue else queue.users

    def _bucket_bytes_on(self, transport: Transport) -> int:
        if self.settings.bucket_bytes is not None:
            return self.settings.bucket_bytes
        costs = profile.DEFAULT  # the size does not matter in other scopes
        if self.settings.scope in SIZED_SCOPES:
            costs = costs_for_steps(transport).costs
        density, options = final_density(self.settings.density, DENSITY.density), Options()
        if self.settings.options.algorithm == "auto":
            options = self.settings.call_options("float32")
        query = transport.size, transport.num_nodes, density, costs, options.algorithm, options.wire
        return choice.bucket_bytes(*query, on_gpu=any(spec.device is not CPU for spec in self.specs.values()))


def _described(spec: TensorSpec) -> tuple[str, str]:
    return spec.name, f"{spec.accumulator.name} {spec.shape}"


@dataclass(frozen=True)
class Rebuilt:
    """The result of `Reducer.rebuild`, the same on all ranks.

    Attributes:
        size: the new number of ranks.
        ranks_lost, elements_lost: ranks that are gone, as numbered in the previous communicator, and the number of
            elements of their residuals. Their gradients of failed steps are lost, too.
        ranks_joined: new ranks, as numbered in the new communicator. Their residuals are zeros.
        step: the number of the next step.
        steps_apart: the difference between the ranks' steps. If it is above 0, broadcast the weights, because some
            ranks have applied an update that others have not.
        unit: the unit of ``step``. It is "round" for `LocalSteps`, which broadcasts the weights itself.
    """

    size: int
    ranks_lost: tuple[int, ...]
    elements_lost: int
    ranks_joined: tuple[int, ...]
    step: int
    steps_apart: int = 0
    unit: str = "step"

    def __str__(self) -> str:
        """Return a sentence for logs."""
        text = f"{self.size} ranks continue with {self.unit} {self.step}"
        if self.ranks_lost:
            text += (
                f"; lost: {format_ranks(self.ranks_lost)}, with residuals and velocities of {self.elements_lost:,} "
                f"elements, and with gradients of {self.unit}s that did not count"
            )
        if self.ranks_joined:
            text += f"; new: {format_ranks(self.ranks_joined)}, with residuals of zeros"
        if self.steps_apart:
            text += f"; ranks differed by {self.steps_apart} in their steps"
            text += ": broadcast the weights" if self.unit == "step" else ""
        return text


class Member(NamedTuple):
    """One rank's message to all ranks."""

    joining: bool  # the rank is new, and takes the state of the other ranks
    step: int  # number of steps that it has made
    rank: int  # its rank in the previous communicator, or -1
    size: int  # the size of the previous communicator, or 0
    words: list[int]  # other numbers that all ranks need; each rank sends the same number of them


class Members:
    """The ranks of a new communicator."""

    def __init__(
        self, transport: Transport, before: Comm, joining: bool, step: int, words: Sequence[int], label: Label
    ) -> None:
        """Gather the messages of all ranks. Collective.

        ``before``: this rank's previous communicator, or its transport. At least one rank must not join.
        """
        step, rank, size = (0, -1, 0) if joining else (step, *_rank_and_size(before))
        gather = WordsGather(transport, [joining, step, rank + 1, size, *words], label)
        queue_of(transport).submit(gather).wait()
        count = len(gather.words) // transport.size
        messages = [gather.words[i : i + count] for i in range(0, len(gather.words), count)]
        self.all = [Member(bool(new), step, rank - 1, size, words) for new, step, rank, size, *words in messages]
        self.stay = [member for member in self.all if not member.joining]  # like `all`, in order of rank
        if not self.stay:
            raise InvalidInputError(
                f"rank {transport.rank}: all {transport.size} ranks join; pass joining=False on at least one rank, "
                "which continues with its state"
            )
        self.lead = self.all.index(self.stay[0])  # the rank from which others take state

    def rebuilt(self, elements: int, *, steps_of_unit: int = 1, unit: str = "step") -> Rebuilt:
        """Return the result. ``elements``: size of each rank's residuals. A ``unit`` has ``steps_of_unit`` steps."""
        steps = [member.step for member in self.stay]
        lost = sorted(set(range(max(member.size for member in self.stay))) - {member.rank for member in self.stay})
        new = [rank for rank, member in enumerate(self.all) if member.joining]
        step, apart = max(steps) // steps_of_unit, max(steps) - min(steps)
        return Rebuilt(len(self.all), tuple(lost), len(lost) * elements, tuple(new), step, apart, unit)


def _rank_and_size(comm: Comm) -> tuple[int, int]:
    """Return this rank's number in a communicator, and its size, without a call; -1 and 0 if they are not known."""
    if isinstance(comm, Transport):
        return comm.rank, comm.size
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
        return comm.Get_rank(), comm.Get_size()
    return -1, 0
