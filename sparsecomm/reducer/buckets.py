"""All buckets of a model, with residuals and velocities by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from sparsecomm.backends import Backends
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.layout import TensorSpec, layout
from sparsecomm.reducer.momentum import MomentumCorrection
from sparsecomm.tensors.arrays import Array, from_host, to_host

__all__ = ["Buckets"]


class Buckets:
    """The buckets in the order of their calls, which stay as they are. There are none before the first `arranged`."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        scope: str,
        dense_below: int,
        correction: MomentumCorrection,
        backends: Backends,
        chunk: int | None = None,
    ) -> None:
        """Prepare for tensors.

        Args:
            specs: of all tensors, by name.
            scope, dense_below: as in `sparsecomm.reducer.layout.layout`.
            correction: of their gradients.
            backends: for all but calls.
            chunk: elements of a chunk, of each of which entries are selected; ``None``: they are of a whole bucket.
        """
        self._specs, self._scope, self._dense_below, self._correction = specs, scope, dense_below, correction
        self._backends, self._chunk = backends, chunk
        self._buckets: list[Bucket] = []
        self._by_name: dict[str, Bucket] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, number: int) -> Bucket:
        return self._buckets[number]

    def of(self, name: str) -> Bucket:
        """Return the bucket of a tensor; that of a tensor of no elements is empty, and never sent."""
        return self._by_name[name]

    def arranged(self, order: Sequence[str] | None, bucket_bytes: int, *, keep: bool = False) -> Buckets:
        """Return other buckets of the same tensors.

        Args:
            order: names, as their gradients become ready; ``None``: the reverse order of the tensors.
            bucket_bytes: a bucket with so many is full.
            keep: copy residuals and velocities; otherwise they begin with zeros.
        """
        specs = [self._specs[name] for name in (reversed(self._specs) if order is None else order)]
        specs = [spec for spec in specs if spec.size]
        buckets = [
            Bucket([specs[i] for i in members], dense, self._correction, self._backends, self._chunk)
            for members, dense in layout(specs, self._scope, self._dense_below, bucket_bytes)
        ]
        by_name = dict.fromkeys(self._specs, Bucket((), True, self._correction, self._backends))
        by_name |= {spec.name: bucket for bucket in buckets for spec in bucket.tensors}
        made = copy.copy(self)
        made._buckets, made._by_name = buckets, by_name
        if keep:
            with _all_of([*self, *made]):
                for before, after in zip(_kept(self), _kept(made), strict=True):
                    for name in before:
                        after[name][:] = before[name]
        return made

    def describe(self) -> list[tuple[bool, list[tuple[str, tuple[int, ...], str]]]]:
        """Return what ranks that talk to each other must have in common."""
        return [(b.dense, [(spec.name, spec.shape, spec.accumulator.name) for spec in b.tensors]) for b in self]

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return copies, in host memory, of the residuals and velocities of all tensors, by name."""
        with _all_of(self._buckets):
            residuals, velocities = _kept(self._buckets)
            return self._shaped(residuals), self._shaped(velocities) if self._correction.momentum else {}

    def restore(self, residuals: Mapping[str, Array], velocities: Mapping[str, Array]) -> None:
        """Set residuals and velocities to flat arrays in host memory, of the accumulators' types."""
        with _all_of(self._buckets):
            for given, kept in zip((residuals, velocities), _kept(self._buckets), strict=True):
                for name, part in kept.items():
                    part[:] = from_host(given[name], part)

    def _shaped(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        found = {}
        for name, spec in self._specs.items():
            flat = to_host(parts[name]) if spec.size else np.zeros(0, spec.accumulator.accumulator)
            found[name] = flat.reshape(spec.shape)
        return found


@contextmanager
def _all_of(buckets: Iterable[Bucket]) -> Iterator[None]:
    """Do work with the memory of several buckets on the current stream."""
    with ExitStack() as stack:
        for bucket in buckets:
            stack.enter_context(bucket.on_stream(None))
        yield


def _kept(buckets: Iterable[Bucket]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the residuals and velocities of buckets: flat views by name."""
    residuals: dict[str, Array] = {}
    velocities: dict[str, Array] = {}
    for bucket in buckets:
        for kept, parts in zip((residuals, velocities), bucket.state(), strict=True):
            kept.update(parts)
    return residuals, velocities
