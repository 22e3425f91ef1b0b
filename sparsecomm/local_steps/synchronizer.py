"""How exchanges use and change parameters: pseudo-gradients go in, and means are applied."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.local_steps.exchange import FragmentExchange, Outcome
from sparsecomm.local_steps.global_parameters import GlobalParameters, ImmutableParameters
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.bucket import on_streams
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Synchronizer"]

_log = logging.getLogger("sparsecomm")


class Synchronizer:
    """Pushes pseudo-gradients to exchanges, and applies their means to the global and the local parameters.

    Attributes:
        shared: the global parameters.
        fragments, reducers: the names and the reducer of each fragment.
        outer: the outer optimizer, or ``None``.
        compared: fragments whose global parameters the ranks know to be equal.
        mixed: checksums of local parameters as an exchange with an alpha has left them, by name.
        unsent: parameters whose residual holds what this rank trained while it was late.
    """

    def __init__(
        self,
        shared: GlobalParameters,
        fragments: Sequence[Sequence[str]],
        reducers: Sequence[Reducer],
        outer: OuterOptimizer | None,
        alpha: float,
        decay: float,
    ) -> None:
        self.shared, self.fragments, self.reducers, self.outer = shared, fragments, reducers, outer
        self._alpha, self._decay = alpha, decay
        self.compared: set[int] = set()
        self.mixed: dict[str, int] = {}
        self.unsent: set[str] = set()

    def push(self, exchange: FragmentExchange, parameters: Mapping[str, object]) -> None:
        """Push the pseudo-gradients that an exchange lacks."""
        for name in filter(exchange.lacks, self.fragments[exchange.fragment]):
            with self.shared.on_stream(name, parameters[name]) as local:
                trained = self._trained(name, local)
                exchange.push(name, self.shared[name], parameters[name] if trained else self._zeros(name))

    def push_residuals(self, exchange: FragmentExchange) -> None:
        """Push for a late exchange only what this rank trained when it was late before, which is in the residuals."""
        names = self.fragments[exchange.fragment]
        with on_streams(self.shared.on_stream_of(name) for name in names):
            for name in names:
                exchange.push(name, self.shared[name], self._zeros(name))

    def _zeros(self, name: str) -> Array | None:
        """Return the global parameter, for a pseudo-gradient of zeros, if the residual holds what was trained late."""
        return self.shared[name].reshape(self.shared.specs[name].shape) if name in self.unsent else None

    def _trained(self, name: str, local: interop.Tensor) -> bool:
        """Return whether this rank has changed a parameter since its last exchange.

        A parameter without elements counts as trained, so that the ranks need not agree that it was not.
        """
        if not local.size:
            return True
        if self.shared.equals(name, local):
            return False
        left = self.mixed.get(name)
        return left is None or left != self.shared.checksum_of(local)

    def wait(self, exchange: FragmentExchange) -> None:
        """Wait until the calls of an exchange have ended. It is usable if the outer step leaves all values finite."""
        outer, shared = self.outer, self.shared
        nesterov = outer if isinstance(outer, NesterovSGD) and type(outer) is NesterovSGD else None
        if outer is not nesterov:  # what other optimizers do is not known before their step
            exchange.wait()
            return

        def accept(sums: Mapping[str, SparseVector], largest: float) -> bool:
            names = [name for name in self.fragments[exchange.fragment] if name in sums]
            found = {n: shared.overflows(n, sums[n], largest, nesterov) for n in shared.on_streams(names)}
            exchange.overflows = {name: indices for name, indices in found.items() if len(indices)}
            return not exchange.overflows

        exchange.wait(accept)

    @default_float_mode
    def apply(self, exchange: FragmentExchange, parameters: Mapping[str, object], rank: int) -> list[str]:
        """Apply an exchange that has ended. Return the names of the local parameters that were replaced.

        If it is late, no call of its fragment's reducer may be in flight.
        """
        if exchange.late:
            self._save_unsent(exchange, parameters)
        usable, names = exchange.outcome is Outcome.USABLE, list(self.fragments[exchange.fragment])
        if usable:
            names = [name for name in names if name not in exchange.without_gradient]
            self._step_outer(exchange, [name for name in names if name not in exchange.stepped], parameters)
        if exchange.late:
            names = [n for n in self.fragments[exchange.fragment] if (usable and n in names) or exchange.saved[n]]
        if exchange.outcome is Outcome.NOT_FINITE:
            exchange.drop_overflows()
            _log.warning(
                "rank %s: round %s, fragment %s was not applied, since a pseudo-gradient was not finite on some rank, "
                "or parameters would not be",
                rank,
                exchange.round,
                exchange.fragment,
            )
            names += [name for name in self.shared.specs if name not in names and not self._finite(name, parameters)]
        alpha = self._alpha if usable and not exchange.late else 0.0
        for name in names:
            if name not in exchange.written:
                self.mixed.pop(name, None)
                with self.writing(name, parameters) as local:
                    self.shared.mix_into(parameters, name, local, alpha)
                    exchange.written.add(name)
                if alpha:  # after an interrupt before this the parameter counts as trained
                    with self.shared.on_stream(name, parameters[name]) as local:
                        self.mixed[name] = self.shared.checksum_of(local)
        return names

    def _save_unsent(self, exchange: FragmentExchange, parameters: Mapping[str, object]) -> None:
        """Move what this rank has trained, and a late exchange does not contain, from local parameters to residuals."""
        for name in self.fragments[exchange.fragment]:
            with self.shared.on_stream(name, parameters[name]) as local:
                if name in exchange.saved:
                    continue
                trained = local.size > 0 and self._trained(name, local)
                if trained:
                    residual = self.reducers[exchange.fragment].residual(name).reshape(-1)
                    with np.errstate(over="ignore", invalid="ignore"):
                        unsent = self.shared.difference(name, local) / residual.dtype.type(self._decay)
                    if np.isfinite(unsent).all():  # the next exchange lets the residual decay before it is sent
                        residual += unsent
                        self.unsent.add(name)
                exchange.saved[name] = trained

    def _step_outer(self, exchange: FragmentExchange, names: list[str], parameters: Mapping[str, object]) -> None:
        """Update global parameters by the means of an exchange."""
        outer, shared = self.outer, self.shared
        together = getattr(outer, "step_together", None)
        try:
            with on_streams(shared.on_stream(name, parameters[name]) for name in names):
                if together is not None and names:
                    together({name: (shared[name], self._mean(exchange, name)) for name in names})
                    exchange.stepped.update(names)
                    return
                for name in names:
                    if outer is not None:
                        outer.step(name, shared[name], self._mean(exchange, name))
                    elif (mean := exchange.means.get(name, exchange.sums.get(name))) is not None:
                        shared.subtract(name, mean)
                    exchange.stepped.add(name)
        except BaseException:
            if outer is not None and type(outer) is not NesterovSGD:  # it may have made a part of its step
                self.compared.discard(exchange.fragment)
            raise

    def _mean(self, exchange: FragmentExchange, name: str) -> Array:
        """Return a mean as a flat array, on the stream of the global parameter."""
        mean = exchange.means.get(name)
        return self.shared.dense(name, exchange.sums.get(name)) if mean is None else mean

    def means_on_host(self, exchange: FragmentExchange) -> dict[str, Array]:
        names = [name for name in self.fragments[exchange.fragment] if name not in exchange.without_gradient]
        return self.shared.to_host({name: self._mean(exchange, name) for name in self.shared.on_streams(names)})

    def writing(self, name: str, parameters: Mapping[str, object]) -> AbstractContextManager[interop.Tensor]:
        """Return a context for writing a local parameter on the stream on which it is ready."""
        writable = not isinstance(parameters, ImmutableParameters)
        return self.shared.on_stream(name, parameters[name], writable=writable)

    def _finite(self, name: str, parameters: Mapping[str, object]) -> bool:
        with self.shared.on_stream(name, parameters[name]) as local:
            return self.shared.finite(local)
