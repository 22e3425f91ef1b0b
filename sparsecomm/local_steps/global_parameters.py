"""The global parameters: what all ranks hold alike, between what each of them trains."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from sparsecomm.backends import Backends, default_float_mode
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, did_you_mean, listed
from sparsecomm.local_steps.outer import NesterovSGD
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.layout import NamedTensors, specs_of
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.tensors.dtypes import BFLOAT16, DType
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["GlobalParameters"]

_FIRST_PART, _LARGEST_PART = 1 << 12, 1 << 22  # elements that are compared at once

# Columns and rows of a block of a digest. No common row length is a multiple of the number of columns, so the elements
# of a column of a matrix are spread over all of them.
_COLUMNS, _ROWS = 1021, 256
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit is lost


class GlobalParameters:
    """Flat arrays by name, in the accumulator's type, on the devices of the local parameters.

    Attributes:
        specs: of the parameters, by name.
    """

    def __init__(self, parameters: NamedTensors, *, writable: bool = True) -> None:
        """Copy parameters.

        Args:
            parameters: the local ones.
            writable: whether they are to be written in place.

        Raises:
            InvalidInputError: they cannot be used.
        """
        pairs = interop.named(parameters, "parameters")
        self.specs: dict[str, TensorSpec] = specs_of(pairs)
        self._writable = writable
        self._backends = Backends()
        self._timelines = {spec.device: self._backends.of(spec.device).timeline() for spec in self.specs.values()}
        self._arrays: dict[str, Array] = {}
        self._limits: dict[str, float] = {}  # magnitudes from which local parameters would be infinite
        self._bounds: dict[str, float] = {}  # upper bounds of the magnitudes of global parameters, where known
        for name, parameter in pairs:
            with self.on_stream(name, parameter, writable=writable) as local:
                self._arrays[name] = self._backends.of(local.device).accumulate(local, None)
                self._limits[name] = local.dtype.rounds_to_infinity

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def shaped(self) -> dict[str, Array]:
        """Return views in the shapes of the parameters."""
        return {name: self._arrays[name].reshape(spec.shape) for name, spec in self.specs.items()}

    @contextmanager
    def on_stream(self, name: str, parameter: object, *, writable: bool = False) -> Iterator[interop.Tensor]:
        """Do work with a local parameter and the global one, on the stream where the local one is ready."""
        local = interop.tensor(parameter, name, writable=writable)
        with self._timelines[local.device].on_stream(local):
            yield local

    def check(self, parameters: object, names: Iterable[str] = ()) -> None:
        """Check that local parameters have the names and shapes of these; of ``names`` also types and devices.

        Raises:
            InvalidInputError: they have not, or those of ``names`` cannot be written.
        """
        if not isinstance(parameters, Mapping):
            raise InvalidInputError(f"parameters: got {type(parameters).__name__}; expected tensors by name")
        if parameters.keys() != self.specs.keys():
            lacking = [name for name in self.specs if name not in parameters]
            others = [name for name in parameters if name not in self.specs]
            raise InvalidInputError(
                f"parameters lack {listed(lacking)} and have {listed(others)} besides; expected the "
                f"{len(self.specs)} names with which LocalSteps was made"
            )
        for name, parameter in parameters.items():
            shape = getattr(parameter, "shape", None)
            if shape is not None and tuple(shape) != self.specs[name].shape:
                raise InvalidInputError(
                    f"parameters: {name!r} has shape {tuple(shape)}; expected {self.specs[name].shape}, as when "
                    "LocalSteps was made; make a new one if the model has changed"
                )
        for name in names:
            self.specs[name].tensor(parameters[name], name, writable=self._writable)

    def known(self, names: object = None) -> set[str]:
        """Return these names of parameters as a set; ``None``: all of them.

        Raises:
            InvalidInputError: they are not all names of parameters.
        """
        given = self.specs if names is None else [names] if isinstance(names, str) else names
        if not isinstance(given, Iterable):
            raise InvalidInputError(f"names={quote(names)}: expected names of parameters, or None for all of them")
        found = set()
        for name in given:
            if not isinstance(name, str) or name not in self.specs:
                raise InvalidInputError(
                    f"names: {quote(name)} is not one of the {len(self.specs)} parameters, {listed(self.specs)}"
                    f"{did_you_mean(name, self.specs)}"
                )
            found.add(name)
        return found

    # -- arithmetic: within `on_stream` -------------------------------------------------------------------------------

    @default_float_mode
    def difference(self, name: str, local: interop.Tensor) -> Array:
        """Return global - local: a new flat array in the accumulator's type."""
        moved: Array = self._arrays[name] - self._backends.of(local.device).accumulate(local, None)
        return moved

    @default_float_mode
    def equals(self, name: str, local: interop.Tensor, values: Array | None = None) -> bool:
        """Return whether a local parameter equals the global one, rounded to the local type, bit for bit.

        Both are read only up to the part that holds the first difference.

        Args:
            name, local: the parameter.
            values: compared in place of the global parameter: a flat array of its size and type.
        """
        expected = self._arrays[name] if values is None else values
        found, begin, count = self._backends.of(local.device).memory_of(local), 0, _FIRST_PART
        while begin < local.size:
            part = slice(begin, begin + count)
            if (found[part] != _rounded(expected[part], local.dtype)).any():
                return False
            begin, count = begin + count, min(8 * count, _LARGEST_PART)
        return True

    @default_float_mode
    def mixed(self, name: str, local: interop.Tensor, alpha: float) -> Array:
        """Return alpha * local + (1 - alpha) * global; with alpha = 0 the global array itself."""
        if not alpha:
            return self._arrays[name]
        return self._backends.of(local.device).mixed(local, self._arrays[name], alpha)

    def mix_into(self, name: str, local: interop.Tensor, alpha: float) -> None:
        """Set a local parameter to what `mixed` returns, rounded to its type."""
        self._backends.of(local.device).mix_into(local, self._arrays[name], alpha)

    @default_float_mode
    def subtract(self, name: str, mean: Array | SparseVector) -> None:
        """Subtract a flat array, or the entries of a vector, from a global parameter."""
        parameter = self._arrays[name]
        if isinstance(mean, DenseSum):
            parameter -= mean.dense
        elif isinstance(mean, SparseVector):
            backend = self._backends.of(self.specs[name].device)
            negated = SparseVector.trusted(mean.indices, -mean.values, mean.size, mean.shape)
            backend.scatter_add(backend.as_tensor(parameter, self.specs[name].shape), negated)
        else:
            parameter -= mean

    @default_float_mode
    def overflows(self, name: str, mean: Array | SparseVector, largest: float, outer: NesterovSGD | None) -> Array:
        """Return the indices at which an outer step would make a parameter infinite, or its velocity. Nothing changes.

        Args:
            name: of the parameter.
            mean: the mean pseudo-gradient.
            largest: no magnitude in ``mean`` is larger.
            outer: makes the step; ``None``: the mean is subtracted.
        """
        parameter, indices = self._arrays[name], None
        if outer is None and self._stays_below_limit(name, largest):
            return np.empty(0, np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            if outer is not None:
                dense = self.dense(name, mean) if isinstance(mean, SparseVector) else mean
                after = outer.preview(name, parameter, dense)
            elif isinstance(mean, SparseVector) and not isinstance(mean, DenseSum):
                indices = mean.indices
                parameter = parameter[indices]
                after = parameter - mean.values
            else:
                after = parameter - (mean.dense if isinstance(mean, DenseSum) else mean)
            bad = (~(abs(after) < self._limits[name]) & (abs(parameter) < self._limits[name])).nonzero()[0]
        return bad if indices is None else indices[bad]

    def _stays_below_limit(self, name: str, largest: float) -> bool:
        """Return whether a parameter surely stays finite when magnitudes up to ``largest`` are subtracted.

        The bound grows by as much, whether or not they are then subtracted. It is found anew when it no longer tells.
        """
        parameter = self._arrays[name]
        limit = min(self._limits[name], float(np.finfo(parameter.dtype).max))
        for bound in (self._bounds.get(name), None):
            if bound is None:
                bound = float(abs(parameter).max()) if parameter.size else 0.0
            after = (bound + largest) * (1 + 1e-6)  # sums are rounded
            if after < limit:
                self._bounds[name] = after
                return True
        return False

    @default_float_mode
    def shifted(self, name: str, local: interop.Tensor, before: Array, sent: Array | None) -> Array:
        """Return a local parameter from which as much is still to be sent as before an exchange, but for ``sent``.

        If nothing is left to be sent, this is the global parameter.

        Args:
            name, local: the parameter.
            before: the global one, before the exchange changed it.
            sent: this rank's contribution; ``None``: nothing.
        """
        if sent is None and self.equals(name, local, before):
            return self._arrays[name]
        unsent: Array = before - self._backends.of(local.device).accumulate(local, None)
        if sent is not None:
            unsent -= sent
        moved: Array = self._arrays[name] - unsent
        return moved

    def write(self, local: interop.Tensor, values: Array) -> None:
        """Set a local parameter, rounded to its type."""
        self._backends.of(local.device).cast_into(values, local)

    def finite(self, local: interop.Tensor) -> bool:
        """Return whether a local parameter holds neither NaN nor infinity."""
        return self._backends.of(local.device).finite(local)

    def checksum_of(self, local: interop.Tensor) -> int:
        """Return a checksum of the bits of a local parameter, of 64 bits, in one fast pass."""
        return _checksum([_digest(self._backends.of(local.device).memory_of(local))])

    def dense(self, name: str, entries: SparseVector | None) -> Array:
        """Return a flat array like a global parameter, of these entries; ``None``: of zeros."""
        spec = self.specs[name]
        backend = self._backends.of(spec.device)
        array = backend.zeros(spec.size, spec.accumulator.accumulator)
        if entries is not None:
            backend.densify(backend.as_tensor(array, spec.shape), entries)
        return array

    # -- all of them, in host memory ----------------------------------------------------------------------------------

    def to_host(self, arrays: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return copies in the shapes of the parameters; of ``arrays`` like some of these, if there are any."""
        each = self._arrays if arrays is None else arrays
        return {name: to_host(each[name]).reshape(self.specs[name].shape) for name in self.on_streams(each)}

    def from_host(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return flat arrays like these with the elements of flat ones in host memory, of the same types."""
        return {name: from_host(arrays[name], self._arrays[name]) for name in self.on_streams(arrays)}

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Set some of them to arrays that `from_host` returned."""
        self._bounds.clear()
        for name in self.on_streams(arrays):
            self._arrays[name][:] = arrays[name]

    def broadcast(self, transport: Transport, root: int) -> None:
        """Give all ranks those of rank ``root``. Collective."""
        self._bounds.clear()
        for name in self.on_streams(self._arrays):
            flat = to_host(self._arrays[name])
            if flat.size:
                transport.broadcast(flat.view(np.uint8), root)
                self._arrays[name][:] = from_host(flat, self._arrays[name])

    def checksum(self, names: Iterable[str]) -> int:
        """Return a checksum of some of them, of 64 bits."""
        return _checksum(self._arrays[name] for name in self.on_streams(names))

    def on_stream_of(self, name: str) -> AbstractContextManager[object]:
        """Return a context for work on the current stream with a global parameter."""
        return self._timelines[self.specs[name].device].on_stream(None)

    def on_streams(self, names: Iterable[str]) -> Iterator[str]:
        """Yield names, each within work on the current stream with the global parameter."""
        for name in names:
            with self.on_stream_of(name):
                yield name


def _rounded(values: Array, dtype: DType) -> Array:
    """Return values of an accumulator rounded to nearest even to a type, of bfloat16 the bits."""
    if dtype.itemsize > 2:
        return values
    if dtype is not BFLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(dtype.view)
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _digest(array: Array) -> Array:
    """Return 1021 numbers that a change of any single element changes: a tenth of the time of a CRC-32 and an Adler-32.

    The bits of the elements are added up in columns, modulo a power of two. Block by block, the sums of the blocks
    before are multiplied, so that equal changes in different blocks do not cancel.
    """
    host = array if isinstance(array, np.ndarray) else to_host(array)
    bits = host.view(f"u{host.itemsize}")
    digest, block_size = np.zeros(_COLUMNS, np.uint64), _COLUMNS * _ROWS
    for begin in range(0, len(bits), block_size):
        block = bits[begin : begin + block_size]
        rows = block[: len(block) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
        digest *= _MULTIPLIER
        digest += np.add.reduce(rows, axis=0, dtype=bits.dtype)
        digest[: len(block) - rows.size] += block[rows.size :]
    return digest


def _checksum(arrays: Iterable[Array]) -> int:
    sums = [0, 1]
    for array in arrays:
        data = to_host(array).view(np.uint8).data
        sums = [zlib.crc32(data, sums[0]), zlib.adler32(data, sums[1])]
    return sums[0] << 32 | sums[1]
