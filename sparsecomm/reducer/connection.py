"""`Connection`: a reducer's communicator and buckets. `Members`: the ranks that continue on a new communicator."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.backends import Backends
from sparsecomm.backends.base import on_streams
from sparsecomm.calls.collectives import gather_by_rank
from sparsecomm.calls.label import Label
from sparsecomm.calls.measurement import costs_for_steps
from sparsecomm.calls.nodes import Nodes, find_nodes
from sparsecomm.calls.options import SumSettings
from sparsecomm.calls.queue import CallQueue, queue_of
from sparsecomm.errors import InvalidInputError, log
from sparsecomm.reducer.bucket import Bucket, Contents
from sparsecomm.reducer.options import DENSITY, SIZED_SCOPES, ReducerSettings, described, final_density
from sparsecomm.reducer.owned import Owner
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import CPU, Device, TensorSpec
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
        settings: ReducerSettings,
        backends: Backends,
        number: int,
        bucket_bytes: int,
        num_ranks: int,
        nodes: Nodes | None = None,
        *,
        has_units: bool = False,
    ) -> None:
        """Make buckets with residuals of zeros. ``backends`` and ``number``: see `Connection`."""
        s, self._specs, self.nodes = settings, specs, nodes
        self.bucket_bytes = bucket_bytes  # the size at which a bucket is complete
        sent = [spec for spec in reversed(specs.values()) if spec.size]
        self.all = [  # in the order of their calls
            Bucket([sent[i] for i in positions], dense, s, backends, num_ranks, nodes, has_units=has_units)
            for positions, dense in layout(sent, s.scope, s.dense_below, bucket_bytes)
        ]
        empty = [
            Bucket([spec], True, s, backends, num_ranks, has_units=has_units)
            for spec in specs.values()
            if not spec.size
        ]
        # Includes tensors without elements, which are never sent.
        self.by_name = {spec.name: bucket for bucket in [*self.all, *empty] for spec in bucket.tensors}
        common = {
            "op": s.op, "scope": s.scope, "chunk": s.chunk_length, "momentum": s.momentum, "masking": s.masking,
            "clip": s.clip, "decay": s.decay, "skip_nonfinite": s.skip_nonfinite,
            "nodes": None if nodes is None else str(nodes),
        }  # fmt: skip
        tensors = [(bucket.dense, [_described(spec) for spec in bucket.tensors]) for bucket in self.all]
        self.label = Label(  # everything that must be equal on the ranks
            (number, common, tensors),
            lambda: [
                ("call", f"a step of Reducer {number}"),
                *described(s.density),
                ("algorithm", s.algorithm),
                ("wire", s.wire),
                *common.items(),
                *(_described(spec) for spec in specs.values() if spec.size),
                ("dense_below", s.dense_below),
                ("bucket_bytes", bucket_bytes),
            ],
        )

    def on_current_stream(self) -> AbstractContextManager[None]:
        """Return a context for work with the memory of all buckets on the current stream."""
        return on_streams(bucket.on_stream(None) for bucket in self.all)

    def contents(self) -> dict[str, Contents]:
        """Return what this rank has of each tensor, in views of the buckets' arrays."""
        return {name: self.by_name[name].contents(name) for name in self._specs}

    def fill(self, contents: Mapping[str, Contents], *, units_lag: bool) -> None:
        """Copy `contents` of other buckets, whose arrays may be in host memory. These buckets must have zeros."""
        for bucket in self.all:
            bucket.units_lag = units_lag
        with self.on_current_stream():
            for name, source in contents.items():
                self.by_name[name].fill(name, source)


class ReducerCount:
    """The number of reducers that have been connected to a transport."""

    def __init__(self, _: Transport) -> None:
        self.value = 0


class Connection:
    """A reducer's connection to the ranks of a communicator, made when the reducer first needs them."""

    # After `connect` or `move`:
    queue: CallQueue  # makes the reducer's calls
    number: int  # of this reducer among the reducers on the transport
    buckets: Buckets
    nodes_note: str  # which nodes there are, for reports; "" if there is nothing to say

    def __init__(
        self, comm: Comm, specs: dict[str, TensorSpec], settings: ReducerSettings, owner: Owner | None = None
    ) -> None:
        self.specs, self.settings, self.owner, self._comm = specs, settings, owner, comm
        self.transport: Transport | None = None  # None before `connect` or `move`
        self.backends = Backends()  # for all work outside calls

    def connect(self) -> Transport:
        """Make the connection and the buckets, and return the transport."""
        transport = transport_of(self._comm)
        self._attach(self._comm, transport, 0, keep=False, moves=False)
        return transport

    def new_buckets(self, bucket_bytes: int) -> Buckets:
        """Return new buckets of zeros, to replace `buckets`."""
        assert self.transport is not None
        return self._buckets(self.number, bucket_bytes, self.transport.size, self.buckets.nodes)

    def _buckets(self, number: int, bucket_bytes: int, num_ranks: int, nodes: Nodes | None) -> Buckets:
        has_units = self.owner is not None
        return Buckets(
            self.specs, self.settings, self.backends, number, bucket_bytes, num_ranks, nodes, has_units=has_units
        )

    # -- ranks --------------------------------------------------------------------------------------------------------

    def move(self, comm: Comm, step: int, *, joining: bool) -> Rebuilt:
        """Continue with the ranks of another communicator: see `sparsecomm.Reducer.rebuild`.

        ``step``: this rank's next step.
        """
        transport, specs = transport_of(comm), self.specs.values()
        keep = not joining and self.transport is not None
        words = [0, sum(spec.size for spec in specs)]  # bucket size, and elements of this rank's residuals
        if self.transport is not None:
            words = [self.buckets.bucket_bytes, sum(bucket.last - bucket.first for bucket in self.buckets.all)]
        number = self._number_on(transport)
        label = Label.of(("call", f"rebuild() of Reducer {number}"), *map(_described, specs))
        members = Members(transport, self.transport or self._comm, joining, step, words, label)
        bucket_bytes = next((member.words[0] for member in members.stay if member.words[0]), 0)
        self._attach(comm, transport, bucket_bytes, keep=keep, moves=True)
        return members.rebuilt(max(member.words[1] for member in members.stay))  # lost ranks had about as many

    def _attach(self, comm: Comm, transport: Transport, bucket_bytes: int, *, keep: bool, moves: bool) -> None:
        """Use ``transport``, which is that of ``comm``, for all later calls, with new buckets.

        ``bucket_bytes``: 0 for the default. ``keep``: copy residuals and velocities from the old buckets. ``moves``:
        `move` calls this; then groups that define nodes may be gone.
        """
        number = self._number_on(transport)
        devices = {spec.device.kind for spec in self.specs.values()}
        try:
            nodes, note = find_nodes(transport, self.settings.nodes, devices)
        except InvalidInputError as error:  # raised on all ranks
            if not moves:
                raise
            nodes, note = None, "unknown after rebuild(), so every rank counts as a node"
            log.warning("rank %s: nodes: %s: %s", transport.rank, note, error)
        size = bucket_bytes or self._bucket_bytes_on(transport, nodes)
        buckets = self._buckets(number, size, transport.size, nodes)
        if keep:
            lag = any(bucket.units_lag for bucket in self.buckets.all)
            with self.buckets.on_current_stream():
                buckets.fill(self.buckets.contents(), units_lag=lag)
        reducers = transport.attached(ReducerCount)
        reducers.value = max(reducers.value, number + 1)
        self.queue, self.number, self.buckets, self.nodes_note = queue_of(transport), number, buckets, note
        self._comm, self.transport = comm, transport

    def _number_on(self, transport: Transport) -> int:
        """Return the number that this reducer has, or would get, on a transport."""
        return self.number if self.transport is transport else transport.attached(ReducerCount).value

    def _bucket_bytes_on(self, transport: Transport, nodes: Nodes | None) -> int:
        if self.settings.bucket_bytes is not None:
            return self.settings.bucket_bytes
        costs = profile.DEFAULT  # the size does not matter in other scopes
        if self.settings.scope in SIZED_SCOPES:
            costs = costs_for_steps(transport).costs
        density, sums = final_density(self.settings.density, DENSITY.density), SumSettings()
        if self.settings.algorithm == "auto":
            sums = self.settings.for_sums("float32")
        size, num_nodes, slices = transport.size, transport.num_nodes, 1
        if nodes is not None:
            size = num_nodes = len(nodes.ranks)
            slices = nodes.per_node
        costs, on_gpu = costs.shared_by(slices), any(spec.device is not CPU for spec in self.specs.values())
        return slices * choice.bucket_bytes(
            size, num_nodes, density, costs, algorithm=sums.algorithm_name, wire=sums.wire, on_gpu=on_gpu
        )


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
        messages = gather_by_rank(transport, [joining, step, rank + 1, size, *words], label)
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
