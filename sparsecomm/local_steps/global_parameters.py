"""`GlobalParameters`, which are the same on all ranks."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from sparsecomm.backends import Backends, default_float_mode
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.local_steps.outer import NesterovSGD
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import BFLOAT16, DType
from sparsecomm.tensors.interop import NamedTensors, TensorSpec, from_host, specs_of, to_host
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["GlobalParameters", "ImmutableParameters"]

_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 22  # elements that `trained` compares at once


class ImmutableParameters(Mapping[str, object]):
    """Local parameters that cannot be written in place, such as JAX's arrays."""

    @abstractmethod
    def replace(self, name: str, values: Array) -> None:
        """Replace a parameter by ``values``, a flat array in the accumulator's type to round to the parameter's."""


class GlobalParameters:
    """Flat arrays by name, in the accumulator's type, on the devices of the local parameters.

    Methods that take a ``local`` tensor must be called within `on_stream`.

    Attributes:
        specs: shapes, types and devices of the parameters, by name.
        compared: fragments whose global parameters are known to be equal on all ranks.
        mixed: checksums of local parameters after an exchange with an alpha above 0, by name.
        unsent: names of parameters whose residual holds training of rounds for which this rank was late.
    """

    def __init__(self, parameters: NamedTensors) -> None:
        """Copy the local parameters, which must be writable unless they are `ImmutableParameters`."""
        pairs = interop.named(parameters, "parameters")
        self.specs: dict[str, TensorSpec] = specs_of(pairs)
        self.compared: set[int] = set()
        self.mixed: dict[str, int] = {}
        self.unsent: set[str] = set()
        self._in_place = not isinstance(parameters, ImmutableParameters)
        self._backends = Backends()
        self._timelines = {spec.device: self._backends.of(spec.device).timeline() for spec in self.specs.values()}
        self._arrays: dict[str, Array] = {}
        self._limits: dict[str, float] = {}  # magnitudes that the parameter's type rounds to infinity
        for name, parameter in pairs:
            with self.on_stream(name, parameter, writable=True) as local:
                self._arrays[name] = self._backends.of(local.device).accumulate(local, None)
                self._limits[name] = local.dtype.rounds_to_infinity

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def shaped(self) -> dict[str, Array]:
        """Return views in the shapes of the parameters."""
        return {name: self._arrays[name].reshape(spec.shape) for name, spec in self.specs.items()}

    @contextmanager
    def on_stream(self, name: str, parameter: object, *, writable: bool = False) -> Iterator[interop.Tensor]:
        """Import a local parameter, and work with it and the global one on its stream."""
        local = interop.tensor(parameter, name, writable=writable and self._in_place)
        with self._timelines[local.device].on_stream(local):
            yield local

    def on_stream_of(self, name: str) -> AbstractContextManager[object]:
        """Work with a global parameter on the current stream."""
        return self._timelines[self.specs[name].device].on_stream(None)

    def on_streams(self, names: Iterable[str]) -> Iterator[str]:
        """Yield names, each within `on_stream_of`."""
        for name in names:
            with self.on_stream_of(name):
                yield name

    def check(self, parameters: object, names: Iterable[str] = ()) -> None:
        """Check the names and shapes of local parameters, and that ``names`` can be read and written."""
        if not isinstance(parameters, Mapping):
            raise InvalidInputError(f"parameters: got {type(parameters).__name__}; expected a dictionary of tensors")
        if parameters.keys() != self.specs.keys():
            missing = [name for name in self.specs if name not in parameters]
            unknown = [name for name in parameters if name not in self.specs]
            raise InvalidInputError(
                f"parameters: missing {listed(missing)}; unknown {listed(unknown)}; pass the constructor's parameters"
            )
        for name, parameter in parameters.items():
            shape = getattr(parameter, "shape", None)
            if shape is not None and tuple(shape) != self.specs[name].shape:
                raise InvalidInputError(
                    f"parameters: {name!r} has shape {tuple(shape)}; expected {self.specs[name].shape}; create a new "
                    "LocalSteps if the model has changed"
                )
        for name in names:
            self.specs[name].tensor(parameters[name], name, writable=self._in_place)

    # -- local parameters ---------------------------------------------------------------------------------------------

    @default_float_mode
    def trained(self, name: str, local: interop.Tensor) -> bool:
        """Return whether a local parameter differs, bit for bit, from what its last exchange left.

        It reads up to the block with the first difference. A parameter without elements counts as trained, which saves
        the ranks an agreement.
        """
        expected, memory = self._arrays[name], self._backends.of(local.device).memory_of(local)
        begin, count, equal = 0, _FIRST_BLOCK, local.size > 0
        while equal and begin < local.size:
            block = slice(begin, begin + count)
            equal = not (memory[block] != _rounded(expected[block], local.dtype)).any()
            begin, count = begin + count, min(8 * count, _LARGEST_BLOCK)
        return not equal and (name not in self.mixed or self.mixed[name] != _checksum([memory]))

    @default_float_mode
    def difference(self, name: str, local: interop.Tensor) -> Array:
        """Return global - local, a new flat array in the accumulator's type."""
        pseudo_gradient: Array = self._arrays[name] - self._backends.of(local.device).accumulate(local, None)
        return pseudo_gradient

    def finite(self, name: str, parameter: object) -> bool:
        """Return whether a local parameter holds neither NaN nor infinity."""
        with self.on_stream(name, parameter) as local:
            return self._backends.of(local.device).finite(local)

    def mix_into(self, parameters: Mapping[str, object], name: str, local: interop.Tensor, alpha: float) -> None:
        """Set a local parameter to alpha * local + (1 - alpha) * global, rounded to its type."""
        backend, array = self._backends.of(local.device), self._arrays[name]
        self.mixed.pop(name, None)
        if isinstance(parameters, ImmutableParameters):
            parameters.replace(name, backend.mixed(local, array, alpha) if alpha else array)
        elif alpha:
            backend.mix_into(local, array, alpha)
        else:
            backend.cast_into(array, local)

    def record_mixed(self, name: str, parameter: object) -> None:
        """Record a local parameter after `mix_into`, so that it does not count as trained."""
        with self.on_stream(name, parameter) as local:
            self.mixed[name] = _checksum([self._backends.of(local.device).memory_of(local)])

    # -- means --------------------------------------------------------------------------------------------------------

    @default_float_mode
    def subtract(self, name: str, mean: Array | SparseVector) -> None:
        """Subtract a mean, dense or sparse, from a global parameter."""
        parameter, spec = self._arrays[name], self.specs[name]
        if isinstance(mean, SparseVector) and not isinstance(mean, DenseSum):
            backend = self._backends.of(spec.device)
            negated = SparseVector.trusted(mean.indices, -mean.values, mean.size, mean.shape)
            backend.scatter_add(backend.as_tensor(parameter, spec.shape), negated)
        else:
            parameter -= mean.dense if isinstance(mean, DenseSum) else mean

    @default_float_mode
    def overflows(self, name: str, mean: SparseVector, largest: float, outer: NesterovSGD | None) -> Array:
        """Return the indices at which an outer step would make a parameter or its velocity infinite. Nothing changes.

        ``largest`` is an upper bound of magnitudes in ``mean``. Without ``outer``, the step subtracts the mean.
        """
        parameter, indices, limit = self._arrays[name], None, self._limits[name]
        with np.errstate(over="ignore", invalid="ignore"):
            if outer is not None:
                after = outer.preview(name, parameter, self.dense(name, mean))
            elif not isinstance(mean, DenseSum):
                indices = mean.indices
                parameter = parameter[indices]
                after = parameter - mean.values
            else:
                bound = min(limit, float(np.finfo(parameter.dtype).max)) * (1 - 1e-6)  # sums are rounded
                if not parameter.size or float(abs(parameter).max()) + largest < bound:
                    return np.empty(0, np.int64)
                after = parameter - mean.dense
            bad = (~(abs(after) < limit) & (abs(parameter) < limit)).nonzero()[0]
        return bad if indices is None else indices[bad]

    def dense(self, name: str, entries: SparseVector | None) -> Array:
        """Return entries as a flat, dense array of the size of a global parameter; ``None``: zeros."""
        spec = self.specs[name]
        backend = self._backends.of(spec.device)
        array = backend.zeros(spec.size, spec.accumulator.accumulator)
        if entries is not None:
            backend.densify(backend.as_tensor(array, spec.shape), entries)
        return array

    # -- all of them, in host memory ----------------------------------------------------------------------------------

    def to_host(self, arrays: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return copies of ``arrays``, by default the global parameters, in the shapes of the parameters."""
        sources = self._arrays if arrays is None else arrays
        return {name: to_host(sources[name]).reshape(self.specs[name].shape) for name in self.on_streams(sources)}

    def from_host(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Copy flat arrays from host memory to the devices of the parameters."""
        return {name: from_host(arrays[name], self._arrays[name]) for name in self.on_streams(arrays)}

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Set global parameters to arrays that `from_host` returned."""
        for name in self.on_streams(arrays):
            self._arrays[name][:] = arrays[name]

    def broadcast(self, transport: Transport, root: int) -> None:
        """Give all ranks the global parameters of rank ``root``, one at a time. Collective."""
        for name in self.on_streams(self._arrays):
            flat = to_host(self._arrays[name])
            if flat.size:
                transport.broadcast(flat.view(np.uint8), root)
                self._arrays[name][:] = from_host(flat, self._arrays[name])

    def checksum(self, names: Iterable[str]) -> int:
        """Return a 64-bit checksum of some global parameters."""
        return _checksum(self._arrays[name] for name in self.on_streams(names))


def _rounded(values: Array, dtype: DType) -> Array:
    """Return values rounded to nearest even to a type; for bfloat16, their bits."""
    if dtype.itemsize > 2:
        return values
    if dtype is not BFLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(dtype.view)
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _checksum(arrays: Iterable[Array]) -> int:
    sums = [0, 1]
    for array in arrays:
        data = (array if isinstance(array, np.ndarray) else to_host(array)).view(np.uint8).data
        sums = [zlib.crc32(data, sums[0]), zlib.adler32(data, sums[1])]
    return sums[0] << 32 | sums[1]
