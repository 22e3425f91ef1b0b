"""All units of a model: how its tensors are laid out, and what is kept of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsecomm.reducer.layout import Group, Spec, layout
from sparsecomm.reducer.momentum import Correction
from sparsecomm.reducer.unit import Unit

__all__ = ["Units"]


class Units:
    """In the order of their calls. There are none before the first `lay_out`."""

    def __init__(self, specs: dict[str, Spec], scope: str, dense_below: int, correction: Correction) -> None:
        self._specs, self._scope, self._dense_below, self._correction = specs, scope, dense_below, correction
        self._units: list[Unit] = []
        self._by_name: dict[str, Unit] = {}

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, number: int) -> Unit:
        return self._units[number]

    def of(self, name: str) -> Unit:
        """That of a tensor; one of no elements has one without tensors."""
        return self._by_name[name]

    def lay_out(self, order: Sequence[str] | None, bucket_bytes: int, *, keep: bool) -> None:
        """Anew, for gradients that become ready in that order, or in the reverse order of their names.

        Args:
            keep: with what has been kept of them; otherwise with zeros.
        """
        before = self._kept() if keep else ({}, {})
        specs = list(reversed(self._specs.values())) if order is None else [self._specs[name] for name in order]
        groups = layout(specs, self._scope, bucket_bytes, self._dense_below)
        self._units = [Unit(group, self._correction) for group in groups]
        nothing = Unit(Group((), dense=True), self._correction)
        self._by_name = {name: nothing for name, spec in self._specs.items() if not spec.size}
        self._by_name |= {spec.name: unit for unit in self._units for spec in unit.group.specs}
        for old, new in zip(before, self._kept(), strict=True):
            for name in old:
                new[name][:] = old[name]

    def describe(self) -> list[Any]:
        """What ranks that talk to each other must have in common."""
        groups = [unit.group for unit in self._units]
        return [(group.dense, [(s.name, s.shape, s.accumulator.name) for s in group.specs]) for group in groups]

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Residuals and velocities of all tensors, by name: copies in host memory."""
        residuals, velocities = self._kept()
        return self._shaped(residuals), self._shaped(velocities) if self._correction.momentum else {}

    def restore(self, residuals: Mapping[str, Any], velocities: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        for given, kept in zip((residuals, velocities), self._kept(), strict=True):
            for name, part in kept.items():
                value = np.ascontiguousarray(given[name], part.dtype).reshape(-1)
                part[:] = value if isinstance(part, np.ndarray) else _on_device(value)

    def _kept(self) -> tuple[dict[str, Any], dict[str, Any]]:
        residuals: dict[str, Any] = {}
        velocities: dict[str, Any] = {}
        for unit in self._units:
            for held, parts in zip((residuals, velocities), unit.state(), strict=True):
                held.update(parts)
        return residuals, velocities

    def _shaped(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, spec in self._specs.items():
            flat = _on_host(parts[name]) if spec.size else np.zeros(0, spec.accumulator.accumulator)
            found[name] = flat.reshape(spec.shape)
        return found


def _on_host(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def _on_device(array: np.ndarray[Any, Any]) -> Any:
    import cupy  # the part that it is for is CuPy's

    return cupy.asarray(array)
