"""`SparseAdamW` for named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.optimizers.adamw import LazyAdamW
from sparsecomm.optimizers.options import RULE, AdamWOptions, AdamWRule, AdamWSettings, settings_of
from sparsecomm.optimizers.state import STATE_FIELDS, SavedMoments, read_moments
from sparsecomm.options import Unpack, with_options
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.state import REDUCER
from sparsecomm.signals import deferred
from sparsecomm.states.loading import Prepared
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors import interop
from sparsecomm.tensors.interop import NamedTensors, to_host
from sparsecomm.transport import Comm

_SCHEMA = REDUCER.extended("SparseAdamW", STATE_FIELDS)


@deferred
class SparseAdamW:
    """AdamW for training over slow links, which exchanges gradients in 1/41 of the bytes of dense sums.

        optimizer = sc.SparseAdamW(weights, lr=1e-3)        # names and arrays, the same on all ranks; updated in place
        for ...:
            gradients = ...                                 # by name, of this rank's samples
            optimizer.step(gradients)

    Each step is collective. Weights are the same on all ranks, bit for bit. A rank keeps AdamW's state of the weights
    that it owns. Its residuals store gradients that it has not sent yet. By default a step updates about 9 % of the
    weights. A weight that was last updated 11 steps ago makes 11 steps of AdamW at once. Use the learning rate that is
    best with dense gradients. At ``density=1.0`` this is AdamW with dense, exact sums.

    A tensor for which no rank has a gradient does not change in that step, and keeps its residual.

    For PyTorch see `sparsecomm.torch.SparseAdamW`, for JAX `sparsecomm.jax.sparse_adamw`.

    Args:
        weights: names and writable arrays of NumPy, CuPy, or any library with ``__dlpack__``, as a dictionary or pairs.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`. ``weight_decay`` may also be a dictionary by
            name; missing weights do not decay. You may set these attributes between steps, to the same values on all
            ranks.
        comm: as in `Reducer`.
        options: see `sparsecomm.optimizers.options.AdamWSettings`.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    maximize: bool

    @with_options(AdamWOptions, AdamWRule, AdamWSettings)
    def __init__(
        self,
        weights: NamedTensors,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 0.01,
        comm: Comm = None,
        **options: Unpack[AdamWOptions],
    ) -> None:
        settings, rule_options = settings_of(SparseAdamW, options)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        vars(self).update(rule_options)
        self.weights = dict(interop.named(weights, "weights"))
        self._shared_rule = AdamWRule()
        self._rules()
        self._reducer = Reducer(self.weights, comm=comm, **settings.reducer_options)
        self._adamw = LazyAdamW(self.weights, self._reducer, settings.check_weights_every)
        for name, weight in self.weights.items():
            self._adamw.specs[name].tensor(weight, name, writable=True)

    @property
    def reducer(self) -> Reducer:
        """The reducer, with its counters, buckets and residuals."""
        return self._reducer

    def step(self, gradients: Mapping[str, object]) -> Step:
        """Exchange gradients and update the weights. Collective. After an interrupt, call it again to continue.

        Args:
            gradients: gradients by name, not changed. ``None`` or a missing name: this rank has no gradient, which
                counts as zeros if another rank has one.

        Returns:
            The outcome. It is not usable, and nothing was updated on any rank, if a gradient was not finite, or if the
            step would have made a weight or a moment infinite. Gradients then stay in the residuals, unless they were
            not finite or too large.

        Raises:
            WeightMismatchError: weights or units differ between ranks.
            SparseCommError: as `sparse_allreduce`. The gradients are in the residuals; you may make the next step.
        """
        if not isinstance(gradients, Mapping):
            raise InvalidInputError(f"gradients: got {type(gradients).__name__}; expected gradients by name")
        if unknown := [name for name in gradients if name not in self.weights]:
            raise InvalidInputError(
                f"gradients: {listed(unknown)} are no names of the {len(self.weights)} weights, {listed(self.weights)}"
            )
        adamw, rules = self._adamw, self._rules()
        for name, gradient in gradients.items():  # before anything is sent
            if gradient is not None:
                adamw.specs[name].tensor(gradient, name)
        done = adamw.unfinished or adamw.exchange(gradients, self.weights, self.weights, rules)
        if not adamw.missing:
            adamw.update(self.weights, done)
        return done

    def _rules(self) -> dict[str, AdamWRule]:
        decay, own = self.weight_decay, {name: getattr(self, name) for name in RULE}

        def rule(weight_decay: float) -> AdamWRule:
            return AdamWRule(**{**own, "weight_decay": weight_decay})

        if not isinstance(decay, Mapping):
            shared = rule(decay)
            if self._shared_rule != shared:
                self._shared_rule = shared
            return dict.fromkeys(self.weights, self._shared_rule)
        if unknown := [name for name in decay if name not in self.weights]:
            raise InvalidInputError(
                f"weight_decay: {listed(unknown)} are no names of the weights, {listed(self.weights)}"
            )
        rules = {name: rule(decay.get(name, 0.0)) for name in self.weights}
        distinct = {own_rule: own_rule for own_rule in rules.values()}
        return {name: distinct[own_rule] for name, own_rule in rules.items()}

    # -- other ranks, and state ---------------------------------------------------------------------------------------

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with the ranks of another communicator: see `Reducer.rebuild`. Collective over them.

        Moments are divided among the new ranks. Those of lost ranks are replaced: first moments by zeros, and second
        moments by approximate values. You must broadcast the weights.
        """
        if (interrupted := self._adamw.unfinished) is not None:
            self._adamw.update(self.weights, interrupted)
        return self._adamw.rebuild(comm, lambda: self._reducer.rebuild(comm, joining=joining))

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set the residuals of these weights, or of all, to zero: see `Reducer.discard`. Call it on all ranks."""
        self._reducer.discard(names)

    def state_dict(self) -> StateDict:
        """Return this rank's state without the weights, which you save yourself: see `Reducer.state_dict`.

        `reshard` makes states for another number of ranks.
        """
        adamw = self._adamw
        adamw.check_complete()
        fields: dict[str, Any] = {}
        for name, moments in adamw.moments.items():
            with adamw.on_stream(name):
                arrays = {key: None if array is None else to_host(array) for key, array in moments._asdict().items()}
            fields[name] = {**arrays, "step": adamw.steps[name], "part": list(adamw.parts[name])}
        return {**self._reducer.state_dict(), "moments": fields, "format": _SCHEMA.format}

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned, or `reshard` made. Collective: all ranks load, or none does.

        Raises:
            InvalidInputError: the state of some rank does not fit. Nothing has changed on any rank.
            SparseCommError: as `Reducer.load_state_dict`.
        """
        adamw, rank = self._adamw, self._reducer.transport.rank

        def prepare(undo: object) -> Prepared:
            prepared = self._reducer.prepare_state(state, _SCHEMA)
            saved = prepared.fields["moments"]
            moments: dict[str, SavedMoments] = {}
            for name, spec in adamw.specs.items() if saved else ():
                if name not in saved:
                    raise InvalidInputError(f"state: moments lack {name!r}; expected moments of all weights or none")
                part = prepared.buckets.by_name[name].part(name, rank)
                moments[name] = read_moments(saved[name], spec, part)
            steps = {name: saved_moments.step for name, saved_moments in moments.items()}

            def commit() -> None:
                prepared.commit()
                adamw.load(moments)

            return Prepared({**prepared.common, "moments": steps}, commit)

        self._reducer.load_with(prepare, ["moments"])

    def report(self) -> str:
        """Return a table for this rank: see `Reducer.report`."""
        return self._reducer.report()

    def __repr__(self) -> str:
        return f"SparseAdamW(lr={self.lr!r}, {len(self.weights)} weights; {self._reducer!r})"
