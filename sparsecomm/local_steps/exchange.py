"""`FragmentExchange`: pushes pseudo-gradients of a fragment, and applies their means to the `GlobalParameters`."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends import Backends, default_float_mode, float_mode_only
from sparsecomm.backends.base import on_streams
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    SparseCommError,
    WeightMismatchError,
    listed,
    log,
)
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer
from sparsecomm.local_steps.schedule import SyncSchedule
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.bucket import Addition
from sparsecomm.reducer.step import error_of
from sparsecomm.states.schema import State, StateDict
from sparsecomm.states.values import digest
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import BFLOAT16, DType
from sparsecomm.tensors.interop import NamedTensors, TensorSpec, from_host, library_of, specs_of, to_host
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

_LABEL = Label.of(("call", "an exchange of LocalSteps"))
_WORDS = 6  # round, fragment, division into local steps, checksum of globals, nanoseconds of a local step, late
_NAMES = "round", "fragment", "local steps", "checksum of the global parameters"
_COMPARED = len(_NAMES)  # the first words, which must be equal on all ranks
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 22  # elements that `trained` compares at once


class ImmutableParameters(Mapping[str, object]):
    """Local parameters that cannot be written in place, such as JAX's arrays."""

    @abstractmethod
    def replace(self, name: str, values: Array) -> None:
        """Replace a parameter by ``values``, a flat array in the accumulator's type to round to the parameter's."""


class GlobalParameters:
    """Flat arrays by name, in the accumulator's type, on the devices of the local parameters.

    Methods that take a ``local`` tensor must be called within `on_stream`.
    """

    def __init__(self, parameters: NamedTensors) -> None:
        """Copy the local parameters, which must be writable unless they are `ImmutableParameters`."""
        pairs = interop.named(parameters, "parameters")
        self.specs: dict[str, TensorSpec] = specs_of(pairs)
        self.compared: set[int] = set()  # fragments whose global parameters are known to be equal on all ranks
        self.mixed: dict[str, int] = {}  # checksums of local parameters after an exchange with an alpha above 0
        self.unsent: set[str] = set()  # names whose residual holds training of rounds for which this rank was late
        self._in_place = not isinstance(parameters, ImmutableParameters)
        backends = Backends()
        self._backends = {spec.device: backends.of(spec.device) for spec in self.specs.values()}
        self._timelines = {device: backend.timeline() for device, backend in self._backends.items()}
        self._arrays: dict[str, Array] = {}
        self._limits: dict[str, float] = {}  # magnitudes that the parameter's type rounds to infinity
        for name, parameter in pairs:
            with self.on_stream(name, parameter, writable=True) as local:
                self._arrays[name] = self._backends[local.device].accumulate(local, None)
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
    def trained(self, names: Sequence[str], parameters: Mapping[str, object]) -> set[str]:
        """Return the names of local parameters that differ, bit for bit, from what their last exchange left.

        A parameter without elements counts as trained. On a CPU, this reads up to the block with the first difference.
        """
        differ: dict[str, Any] = {}
        for name in names:
            with self.on_stream(name, parameters[name]) as local:
                expected, memory = self._arrays[name], self._backends[local.device].memory_of(local)
                begin, count = 0, _FIRST_BLOCK if local.device is interop.CPU else local.size
                while begin < local.size:
                    block = slice(begin, begin + count)
                    differ[name] = (memory[block] != _rounded(expected[block], local.dtype)).any()
                    if local.device is interop.CPU and differ[name]:
                        break
                    begin, count = begin + count, min(8 * count, _LARGEST_BLOCK)
        differs = self._read(differ)
        trained = {name for name in names if differs.get(name, True)}
        for name in trained & self.mixed.keys():
            if self.mixed[name] == self._checksum_of(name, parameters[name]):
                trained.discard(name)
        return trained

    def _read(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of 0-dimensional arrays by name. The host waits once for each GPU."""
        values: dict[str, Any] = {}
        for device, timeline in self._timelines.items():
            of_device = {n: scalar.reshape(1) for n, scalar in scalars.items() if self.specs[n].device == device}
            if of_device:
                with timeline.on_stream(None):
                    numbers = library_of(next(iter(of_device.values()))).concatenate([*of_device.values()]).tolist()
                values |= zip(of_device, numbers, strict=True)
        return values

    @default_float_mode
    def difference(self, name: str, local: interop.Tensor) -> Array:
        """Return global - local, a new flat array in the accumulator's type."""
        pseudo_gradient: Array = self._arrays[name] - self._backends[local.device].accumulate(local, None)
        return pseudo_gradient

    def finite(self, name: str, parameter: object) -> bool:
        """Return whether a local parameter holds neither NaN nor infinity."""
        with self.on_stream(name, parameter) as local:
            return self._backends[local.device].finite(local)

    def mix_into(self, parameters: Mapping[str, object], name: str, local: interop.Tensor, alpha: float) -> None:
        """Set a local parameter to alpha * local + (1 - alpha) * global, rounded to its type."""
        backend, array = self._backends[local.device], self._arrays[name]
        self.mixed.pop(name, None)
        if isinstance(parameters, ImmutableParameters):
            parameters.replace(name, backend.mixed(local, array, alpha) if alpha else array)
        elif alpha:
            backend.mix_into(local, array, alpha)
        else:
            backend.cast_into(array, local)

    def record_mixed(self, name: str, parameter: object) -> None:
        """Record a local parameter after `mix_into`, so that it does not count as trained."""
        self.mixed[name] = self._checksum_of(name, parameter)

    def _checksum_of(self, name: str, parameter: object) -> int:
        with self.on_stream(name, parameter) as local:
            return digest([self._backends[local.device].memory_of(local)])

    # -- means --------------------------------------------------------------------------------------------------------

    @default_float_mode
    def subtract(self, name: str, mean: Array | SparseVector) -> None:
        """Subtract a mean, dense or sparse, from a global parameter."""
        parameter, spec = self._arrays[name], self.specs[name]
        if isinstance(mean, SparseVector) and not isinstance(mean, DenseSum):
            backend = self._backends[spec.device]
            negated = SparseVector.trusted(mean.indices, -mean.values, mean.size, mean.shape)
            backend.scatter_add(backend.as_tensor(parameter, spec.shape), negated)
        else:
            parameter -= mean.dense if isinstance(mean, DenseSum) else mean

    @default_float_mode
    def overflows(
        self, means: Mapping[str, SparseVector], largest: float, outer: NesterovSGD | None
    ) -> dict[str, Array]:
        """Return by name the indices at which an outer step would make a parameter or its velocity infinite, if any.

        Nothing changes. ``largest`` is an upper bound of magnitudes in the means. Without ``outer``, the step subtracts
        the mean.
        """
        dense = [name for name, mean in means.items() if outer is None and isinstance(mean, DenseSum) and mean.size]
        maxima = self._read({name: abs(self._arrays[name]).max() for name in self.on_streams(dense)})
        bad, indices = dict[str, Array](), dict[str, Array]()
        for name in self.on_streams(means):
            parameter, mean, limit = self._arrays[name], means[name], self._limits[name]
            far = min(limit, float(np.finfo(parameter.dtype).max)) / 2  # no rounding reaches the limit from here
            if not parameter.size or (name in maxima and maxima[name] + largest < far):
                continue
            if outer is not None:
                after = outer.preview(name, parameter, self.dense(name, mean))
            elif isinstance(mean, DenseSum):
                after = parameter - mean.dense
            else:
                indices[name] = mean.indices
                parameter = parameter[mean.indices]
                after = parameter - mean.values
            bad[name] = ~(abs(after) < limit) & (abs(parameter) < limit)
        any_bad = self._read({name: bad[name].any() for name in self.on_streams(bad)})
        names = self.on_streams([name for name in any_bad if any_bad[name]])
        positions = {name: bad[name].nonzero()[0] for name in names}
        return {name: indices[name][at] if name in indices else at for name, at in positions.items()}

    def dense(self, name: str, entries: SparseVector | None) -> Array:
        """Return entries as a flat, dense array of the size of a global parameter; ``None``: zeros."""
        spec = self.specs[name]
        backend = self._backends[spec.device]
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
        return digest(self._arrays[name] for name in self.on_streams(names))


def _rounded(values: Array, dtype: DType) -> Array:
    """Return values rounded to nearest even to a type; for bfloat16, their bits."""
    if dtype.itemsize > 2:
        return values
    if dtype is not BFLOAT16:
        return values.astype(dtype.view)
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


class Outcome(Enum):
    """How an exchange has ended."""

    PENDING = auto()  # not yet
    USABLE = auto()  # its sums can be applied
    NOT_FINITE = auto()  # a pseudo-gradient, or the outer step, is not finite on some rank
    FAILED = auto()  # a call raised an error


class Rules(NamedTuple):
    """The settings of `LocalSteps` that exchanges use."""

    schedule: SyncSchedule
    outer: OuterOptimizer | None
    alpha: float  # ``fragment_update_alpha``
    decay: float  # of the residuals


def words_gather(transport: Transport, words: Sequence[int] = (0,) * _WORDS) -> WordsGather:
    """Return the call that gathers the words of all ranks."""
    return WordsGather(transport, list(words), _LABEL)


class FragmentExchange:
    """An exchange that has begun and is not applied yet.

    The reducer's calls sum the pseudo-gradients. One more call gathers six words of each rank. The first four words are
    also in the label of the reducer's calls. If they differ, these calls fail on all ranks, and the pseudo-gradients
    stay in the residuals. So usually the words are gathered last, and are only waited for if the sums have failed: they
    say whether the positions or the weights differ. After an interrupt, each method may be called again.
    """

    def __init__(
        self, fragment: int, round_no: int, reducer: Reducer, shared: GlobalParameters, rules: Rules, late: bool
    ) -> None:
        self.fragment, self.round = fragment, round_no  # the round in which it is applied
        self.late = late  # whether the deadline's thread has begun it, without the program's parameters
        self.names = reducer.names
        self.outcome = Outcome.PENDING
        self.error: BaseException | None = None
        self.without_gradient: frozenset[str] = frozenset()  # parameters that no rank has trained; they do not change
        self.nanoseconds: tuple[int, ...] = ()  # the duration of a local step, by rank; empty: unknown
        self.left_out: tuple[int, ...] = ()  # the ranks that were late
        self._reducer, self._shared, self._rules = reducer, shared, rules
        self._comparison: Handle | None = None
        self._reducer_error: BaseException | None = None
        self._sums: Mapping[str, SparseVector] = {}  # without sums that are zero
        self._means: dict[str, Array] = {}  # used instead of sums if the exchange was loaded from a state
        self._overflows: dict[str, Array] = {}  # the indices at which the outer step would overflow
        self._cause = ""  # why it is not finite, if this is known
        self._stepped: set[str] = set()  # names whose global parameter has been updated
        self._was_trained: dict[str, bool] = {}  # if late: whether this rank has trained the parameter
        self._written: set[str] = set()  # names whose local parameter has been written

    def state(self) -> StateDict:
        """Return the results of an exchange that has ended. "means" is ``None`` unless it is usable."""
        shared, means = self._shared, None
        if self.outcome is Outcome.USABLE:
            names = shared.on_streams([name for name in self.names if name not in self.without_gradient])
            means = shared.to_host({name: self._mean(name) for name in names})
        return {
            "fragment": self.fragment,
            "round": self.round,
            "nanoseconds": list(self.nanoseconds),
            "means": means,
            "without_gradient": sorted(self.without_gradient),
        }

    def load(self, state: State) -> None:
        """Load the results that `state` returned."""
        if (means := state["means"]) is not None:
            self._means = self._shared.from_host(means)
        self.outcome = Outcome.NOT_FINITE if means is None else Outcome.USABLE
        self.nanoseconds, self.without_gradient = tuple(state["nanoseconds"]), frozenset(state["without_gradient"])

    # -- pseudo-gradients go in ---------------------------------------------------------------------------------------

    def begin(self, transport: Transport, steps: Sequence[int], nanoseconds: int) -> None:
        """Prepare the words, before a push. ``nanoseconds`` is the duration of this rank's local step; 0: unknown."""
        self._step, self._transport, schedule = self._reducer.step, transport, self._rules.schedule
        division = schedule.steps_between(self.fragment, self.round)
        if schedule.by_speed:
            division = zlib.crc32(repr((schedule, steps)).encode())
        compared = self._shared.compared  # the same on all ranks, or the exchange fails
        checksum = 0 if self.fragment in compared else self._shared.checksum(self.names)
        words = [self.round, self.fragment, division, checksum, nanoseconds, self.late]
        self._gather = words_gather(transport, words)
        settings = {**asdict(schedule), "fragment_update_alpha": self._rules.alpha}
        position = dict(zip(_NAMES, words, strict=False)) | {"local steps": steps if schedule.by_speed else division}
        self._reducer.label = Label((position, division), lambda: (settings | position).items())
        self._words_first = bool(schedule.by_speed or schedule.deadline)  # all ranks need them
        if self._words_first:
            self._comparison = queue_of(transport).submit(self._gather)
        compared.add(self.fragment)

    def push(self, parameters: Mapping[str, object]) -> None:
        """Push the pseudo-gradients, and begin the calls."""
        is_open = self._reducer.step == self._step
        names = [name for name in self.names if is_open and not self._reducer.pushed(name)]
        trained = self._shared.trained(names, parameters)
        for name in names:
            self._push(name, parameters[name] if name in trained else self._unchanged(name))
        self._end_pushes()

    def push_residuals(self) -> None:
        """Push, for a late rank, only training of earlier rounds that residuals hold, and begin the calls."""
        with on_streams(self._shared.on_stream_of(name) for name in self.names):
            for name in self.names:
                self._push(name, self._unchanged(name))
        self._end_pushes()

    def _push(self, name: str, after: object | None) -> None:
        """Push the global parameter minus the local one, ``after``; ``None``: there is no pseudo-gradient."""
        self._reducer.push_with(name, after, Addition(minuend=self._shared[name]))

    def _unchanged(self, name: str) -> Array | None:
        """Return the global parameter if the residual holds unsent training, otherwise ``None``.

        Pushed as the local parameter, it makes a pseudo-gradient of zeros, with which the residual is sent.
        """
        shared = self._shared
        return shared[name].reshape(shared.specs[name].shape) if name in shared.unsent else None

    def _end_pushes(self) -> None:
        """Begin the calls that an interrupt of a push has left out, and gather the words unless this has begun."""
        self._reducer.start_ready()
        if self._comparison is None:
            self._comparison = queue_of(self._transport).submit(self._gather)
        self._shared.unsent.difference_update(self.names)

    # -- sums come out ------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the calls have ended, and set `outcome`."""
        if self.outcome is not Outcome.PENDING:
            return
        if self._reducer.step == self._step:
            known = self._rules.outer is None or type(self._rules.outer) is NesterovSGD
            try:
                self._reducer.wait(self._fits if known else None)
            except BaseException as error:
                if self._reducer.step == self._step:
                    raise  # the wait was interrupted
                self._reducer_error = error
        step, raised = self._reducer.last, self._reducer_error
        needs_words = step is None or self._words_first or not self._transport.threaded
        different = self._compare() if needs_words else None
        if step is None:
            if different is not None and different.__cause__ is raised:
                different = None  # the words were not gathered, because a sum had failed
            self.error, self.outcome = different or raised, Outcome.FAILED
            return
        self._sums, self.without_gradient = step.sums_without_out, step.without_gradient
        self.outcome = Outcome.USABLE if step.usable else Outcome.NOT_FINITE
        self._cause = step.cause.replace("gradient", "pseudo-gradient")
        if raised is not None or (different is not None and not isinstance(different, SparseCommError)):
            raise raised or different  # type: ignore[misc]  # an interrupt after the sums were complete
        if different is not None:
            log.info("fragment %s was summed, although the ranks could not be compared: %s", self.fragment, different)

    def _fits(self, sums: Mapping[str, SparseVector], largest: float) -> bool:
        """Return whether all values stay finite in the outer step: see `Reducer.wait`."""
        shared, outer = self._shared, self._rules.outer
        nesterov = outer if isinstance(outer, NesterovSGD) else None
        means = {name: sums[name] for name in self.names if name in sums}
        self._overflows = shared.overflows(means, largest, nesterov)
        return not self._overflows

    def end_comparison(self) -> None:
        """Wait until the words have been gathered; then no call is in flight."""
        if self._comparison is not None:
            error_of(self._comparison)

    def _compare(self) -> BaseException | None:
        """Wait for the words. Return an error if they differ between ranks, or were not gathered."""
        assert self._comparison is not None
        if (error := error_of(self._comparison)) is not None:
            return error
        gathered, rank = self._gather.words, self._transport.rank
        by_rank = [gathered[i : i + _WORDS] for i in range(0, len(gathered), _WORDS)]
        if any(words[: _COMPARED - 1] != by_rank[0][: _COMPARED - 1] for words in by_rank):
            return CollectiveMismatchError(
                f"{self._reducer_error}. Nothing was applied, and the pseudo-gradients are in the residuals. All ranks "
                "must have the same sync_every, by_speed, deadline, fragments and fragment_sync_delay, take the same "
                "number of local steps in a round (or set by_speed=True), and resume from states saved together; "
                "LocalSteps.rebuild brings all ranks to one place"
            )
        for other, words in enumerate(by_rank):
            if words[_COMPARED - 1] != by_rank[0][_COMPARED - 1]:
                return WeightMismatchError(
                    f"rank {rank}: the global parameters of rank {other} in fragment {self.fragment} differ from rank "
                    "0's. Create LocalSteps with the same parameters on all ranks: load one checkpoint, or "
                    "broadcast them. If an interrupt ended an outer step, call LocalSteps.rebuild on all ranks"
                )
        self.nanoseconds = tuple(words[4] for words in by_rank)
        self.left_out = tuple(other for other, words in enumerate(by_rank) if words[5])
        return None

    # -- means are applied --------------------------------------------------------------------------------------------

    @float_mode_only
    def apply(self, parameters: Mapping[str, object], rank: int) -> list[str]:
        """Apply an exchange that has ended. Return the names of the local parameters that were replaced.

        If it is late, no call of its fragment's reducer may be in flight.
        """
        shared, usable, names = self._shared, self.outcome is Outcome.USABLE, [*self.names]
        if self.late:
            self._save_unsent(parameters)
        if usable:
            names = [name for name in names if name not in self.without_gradient]
            self._step_outer([name for name in names if name not in self._stepped], parameters)
        if self.late:
            names = [name for name in self.names if (usable and name in names) or self._was_trained[name]]
        if self.outcome is Outcome.NOT_FINITE:
            for name, indices in self._overflows.items():  # drop these entries, which would overflow again
                self._reducer.drop(name, indices)
            text = "round %s, fragment %s was not applied: %s"
            log.warning(text, self.round, self.fragment, self._cause or f"rank {rank}: it was not finite when saved")
            names += [name for name in shared.specs if name not in names and not shared.finite(name, parameters[name])]
        alpha = self._rules.alpha if usable and not self.late else 0.0
        for name in names:
            if name not in self._written:
                with shared.on_stream(name, parameters[name], writable=True) as local:
                    shared.mix_into(parameters, name, local, alpha)
                    self._written.add(name)
                if alpha:  # if an interrupt prevents this, the parameter counts as trained
                    shared.record_mixed(name, parameters[name])
        return names

    @default_float_mode
    def _save_unsent(self, parameters: Mapping[str, object]) -> None:
        """Add this rank's training, which a late exchange does not contain, to the residuals."""
        shared = self._shared
        names = [name for name in self.names if name not in self._was_trained]
        trained = shared.trained(names, parameters)
        for name in names:
            with shared.on_stream(name, parameters[name]) as local:
                if name in trained:
                    residual = self._reducer.residual(name).reshape(-1)
                    decay = residual.dtype.type(self._rules.decay)  # by which the next exchange multiplies
                    unsent = shared.difference(name, local) / decay
                    if np.isfinite(unsent).all():
                        residual += unsent
                        shared.unsent.add(name)
                self._was_trained[name] = name in trained

    def _step_outer(self, names: list[str], parameters: Mapping[str, object]) -> None:
        """Update global parameters by the means."""
        outer, shared = self._rules.outer, self._shared
        together = getattr(outer, "step_together", None)
        try:
            with on_streams(shared.on_stream(name, parameters[name]) for name in names):
                if together is not None and names:
                    together({name: (shared[name], self._mean(name)) for name in names})
                    self._stepped.update(names)
                    return
                for name in names:
                    if outer is not None:
                        outer.step(name, shared[name], self._mean(name))
                    elif (mean := self._means.get(name, self._sums.get(name))) is not None:
                        shared.subtract(name, mean)
                    self._stepped.add(name)
        except BaseException:
            if outer is not None and type(outer) is not NesterovSGD:  # it may have made part of its step
                shared.compared.discard(self.fragment)
            raise

    def _mean(self, name: str) -> Array:
        """Return a mean as a flat array, on the stream of the global parameter."""
        mean = self._means.get(name)
        return self._shared.dense(name, self._sums.get(name)) if mean is None else mean
