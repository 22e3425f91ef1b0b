"""Local steps, which a training loop calls after each step of its own optimizer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparsecomm import transport
from sparsecomm.backends import default_float_mode
from sparsecomm.calls.loading import Prepared, Undo, load
from sparsecomm.checks import flag, number, shown
from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.local_steps import state as states
from sparsecomm.local_steps.defaults import DEFAULTS, with_defaults
from sparsecomm.local_steps.exchange import FragmentExchange
from sparsecomm.local_steps.fragments import SyncSchedule, split_names
from sparsecomm.local_steps.global_parameters import GlobalParameters
from sparsecomm.local_steps.members import compared_members, settings_words
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer, SharedState, load_outer
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.bucket import Streams
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.layout import NamedTensors
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule, density_at
from sparsecomm.reducer.state import COMMON, FORMAT
from sparsecomm.signatures import with_options
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalSteps"]

_log = logging.getLogger("sparsecomm")


class LocalSteps:
    """Trains by local steps, and sums sparsely what they did, once in a round (DiLoCo, SparseLoCo).

    Each rank trains its own parameters, the local ones, with an optimizer of its own. Once in a round of ``sync_every``
    steps it subtracts them from the global parameters, which are the same on all ranks. That difference is the
    pseudo-gradient. The ranks average it, by a `Reducer`; the outer optimizer changes the global parameters by the
    mean; and training goes on from them.

        local = sc.LocalSteps(parameters, sync_every=30)             # names and arrays
        for ...:
            optimizer.step()                                         # writes the parameters in place
            local.step(parameters)                                   # most often only counts
        model = local.global_parameters()

    What is not sent waits in residuals, and takes the place of the outer momentum (SparseLoCo: Sarfi et al., 2025,
    Algorithm 1). By default a rank selects 64 entries of each chunk of 4,096, in 2 bits each beside their index. The
    sums, all of them or the largest, twice as many as a rank selects, are divided by the number of ranks that sent
    something there.
    Residuals decay by 0.8 in a round, where SparseLoCo has 0.95: docs/reports/local-steps.md says why, and what else to
    choose.

    **Schedule.** A round is ``sync_every`` local steps. Fragment i of F is synchronised after local step
    (i + 1) * sync_every // F of each round, each fragment once, in the same order on all ranks. With a delay of d its
    exchange begins d local steps before (in the first round, after the first step at the earliest), goes on beside the
    local steps, and is applied at the same step as without.

    **Errors.** `step` and `finish` raise the error of an exchange where it would be applied. It then counts for nobody:
    the outer optimizer makes no step, the fragment's local parameters are set to the global ones, and the
    pseudo-gradient is in the residuals, which the next exchange sends. The local step has been counted. So ranks that
    catch the error go on alike, with the next local step, or after `shrink` and `rebuild`. If the error came when some
    ranks had the result already (see docs/footguns.md), their global parameters differ: `rebuild` makes them equal.

    **Interrupts.** After an exception of a signal handler, such as Ctrl-C, call `finish` or go on with the next local
    step: what was interrupted goes on where it stopped. ``round`` and ``local_step`` say whether the step has been
    counted; if not, call `step` again. An outer optimizer other than `NesterovSGD` may have made a step in part. The
    fragment's next exchange then raises `WeightMismatchError` on all ranks, until `rebuild` has made them equal.

    **NaN.** With ``skip_nonfinite`` the same holds, without an error, if a pseudo-gradient was not finite on any rank.
    Finite ones wait in the residuals, others are dropped. Parameters of other fragments that are not finite are set to
    the global ones, too. Reset the inner optimizer's state where it holds NaN.

    **Checkpoints.** `state_dict` holds the global parameters, the residuals, the outer optimizer's state, and what an
    exchange under way has brought. The local parameters, which differ between ranks, and the inner optimizer's state
    are yours to save, on each rank.

    Args:
        parameters: names and tensors, or pairs of them: anything with ``__dlpack__`` that can be written in place. They
            are copied: the global parameters begin with them, and must be the same on all ranks, which compare
            checksums of them in the first exchange.
        density: of what each rank selects; or a function of a fragment's exchange, counted from 0: as in `Reducer`.
        sync_every: local steps of a round.
        fragments: how many parts of neighbouring tensors, of about equal size, are synchronised in turn; or their
            names, part by part.
        fragment_sync_delay: local steps between the beginning of an exchange and its application.
        fragment_update_alpha: how much of the local parameters is kept where an exchange is applied: local = alpha *
            local + (1 - alpha) * global.
        outer: the outer optimizer, such as `NesterovSGD`; ``None``: global = global - mean.
        comm: as in `sparse_allreduce`.
        skip_nonfinite: as in `Reducer`, see above.
        options: of the `Reducer`, with other defaults: ``scope="chunk"``, ``op="mean_of_contributors"``
            where the algorithm counts them, ``decay=0.8``, and ``wire="packed_int2"`` if no parameter is float64.
            ``algorithm="auto"`` takes "split:2" or "allgather", whichever costs less: what trains as well.

    Attributes:
        local_step: how many local steps of this round have been taken.
        round: its number, from 0.
        reducers: one for each fragment.
        fragments: the names of each.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    @with_options(ReducerOptions, Reducer.__init__, **DEFAULTS)
    def __init__(
        self,
        parameters: NamedTensors,
        density: Schedule = 64 / 4096,
        *,
        sync_every: int = 30,
        fragments: int | Sequence[Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        outer: OuterOptimizer | None = None,
        comm: transport.Comm = None,
        skip_nonfinite: bool = True,
        **options: Unpack[ReducerOptions],
    ) -> None:
        pairs = interop.named(parameters, "parameters")
        self._globals = GlobalParameters(pairs, writable=self._in_place)
        specs = self._globals.specs
        self.fragments = split_names({name: spec.size for name, spec in specs.items()}, fragments)
        self._schedule = SyncSchedule(sync_every, len(self.fragments), fragment_sync_delay)
        alpha = number(fragment_update_alpha)
        if not 0 <= alpha <= 1:
            raise InvalidInputError(
                f"fragment_update_alpha={shown(fragment_update_alpha)}: expected a number from 0 to 1"
            )
        if outer is not None and not callable(getattr(outer, "step", None)):
            raise InvalidInputError(
                f"outer={shown(outer)}: expected an outer optimizer, such as NesterovSGD(), or None"
            )
        if isinstance(op := options.get("op"), str) and op == "sum":
            raise InvalidInputError("op='sum': expected a mean, which is as long as what one rank moves")
        self._alpha, self._outer = alpha, outer
        self._comm: transport.Comm = comm  # the transport, when it was needed
        options = with_defaults(specs.values(), **options)
        tensors = dict(pairs)
        self.reducers = tuple(
            Reducer(
                {name: tensors[name] for name in names}, density, comm=comm, skip_nonfinite=skip_nonfinite, **options
            )
            for names in self.fragments
        )
        told = {key: value for key, value in options.items() if key not in ("on_step", "bucket_bytes")}
        self._settings = settings_words(
            [(name, spec.shape, spec.accumulator.name) for name, spec in specs.items()],
            self.fragments,
            self._schedule.sync_every,
            self._schedule.delay,
            alpha,
            density_at(density, 0),
            type(outer).__name__,
            (flag("skip_nonfinite", skip_nonfinite), sorted((key, shown(value)) for key, value in told.items())),
        )
        self._taken = 0  # local steps, over all rounds
        self._exchanges: dict[int, FragmentExchange] = {}  # under way, or not applied yet, by fragment
        # What is to be begun, for a round, and what is to be applied, in this order: fragments. Empty between steps,
        # unless one was interrupted.
        self._due: deque[tuple[int, int | None]] = deque()
        # Fragments of which ranks have compared the global parameters, and no interrupt may have divided a step of the
        # outer optimizer since.
        self._compared: set[int] = set()
        self._replaced: list[str] = []  # names of parameters that were replaced, until `step` returns them

    _in_place = True  # `_write` writes local parameters where they are: `sparsecomm.jax.LocalSteps` makes new ones

    @property
    def local_step(self) -> int:
        """How many local steps of this round have been taken."""
        return self._taken % self._schedule.sync_every

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._taken // self._schedule.sync_every

    def __repr__(self) -> str:
        sizes = [spec.size for spec in self._globals.specs.values()]
        schedule, outer = self._schedule, type(self._outer).__name__ if self._outer is not None else None
        return (
            f"LocalSteps({len(sizes)} tensors of {sum(sizes):,} elements, sync_every={schedule.sync_every}, "
            f"fragments={len(self.fragments)}, outer={outer}; round {self.round}, local step {self.local_step})"
        )

    # -- local steps --------------------------------------------------------------------------------------------------

    def step(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Count a local step; begin and apply the exchanges that are due after it.

        Args:
            parameters: the local ones, after the local step: the names, shapes, types and devices of the constructor's.

        Returns:
            The names of the parameters that were replaced, in place. Most often none.

        Raises:
            InvalidInputError: parameters are others. Nothing has changed.
            CollectiveMismatchError: ranks have taken unequally many local steps, or their settings differ.
            WeightMismatchError: in the first exchange: the global parameters differ.
            SparseCommError: the exchange failed, as in `Reducer.wait`. See above for what then holds.
        """
        number = self._taken + 1
        begins, applies = self._schedule.begins(number), self._schedule.applies(number)
        self._globals.check(parameters, self._names([*applies, *(i for i, _ in begins)]))
        due = deque([*self._due, *begins, *((i, None) for i in applies)])
        self._taken, self._due = number, due
        return self._go_on(parameters)

    def finish(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Wait for the exchanges that are under way, and apply them now. Begin none.

        Returns, Raises: as `step`.
        """
        self._globals.check(parameters, self._names(self._exchanges))
        self._due = deque([*self._due, *((i, None) for i in self._exchanges if (i, None) not in self._due)])
        return self._go_on(parameters)

    def global_parameters(self) -> dict[str, Array]:
        """Return the global parameters: views of their shapes, in float32 (float64 for float64), on their devices.

        They change with every exchange, and are the model to evaluate and to save.
        """
        return self._globals.shaped()

    def report(self) -> str:
        """Return a small table, of this rank: as `Reducer.report`, per round, of all fragments together."""
        total = Counters()
        for reducer in self.reducers:
            total = total.added_to(reducer.counters)
        first, *others = self.reducers
        return "\n".join([total.table("round"), *first.report_lines(others)])

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on as if it had not stopped: NumPy arrays, numbers, lists and texts.

        Also in the middle of a round. An exchange under way is waited for, and what it brought is in the state, to be
        applied where it is due; an error of it is raised there.

        Raises:
            InvalidInputError: an exception of a signal handler has interrupted `step`: call `finish` first.
        """
        ranks = self._idle("state_dict")
        for exchange in self._exchanges.values():
            exchange.wait()
        return {
            "format": FORMAT,
            "world_size": ranks.size,
            "rank": ranks.rank,
            "round": self.round,
            "local_step": self.local_step,
            "sync_every": self._schedule.sync_every,
            "fragment_sync_delay": self._schedule.delay,
            "fragments": [list(names) for names in self.fragments],
            "global_parameters": self._globals.to_host(),
            "outer": None if self._outer is None else self._outer.state_dict(),
            "reducers": [reducer.state_dict() for reducer in self.reducers],
            "exchanges": [
                {
                    "fragment": exchange.fragment,
                    "round": exchange.round,
                    "means": self._globals.to_host(exchange.means) if exchange.usable else None,
                }
                for exchange in self._exchanges.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank of as many ranks, bit for bit; or `reshard`.

        Collective: all ranks load, or none. Load the local parameters and the inner optimizer's state, too. The outer
        optimizer loads its state before the ranks compare what they have; if one refuses, it is given its own again.

        Raises:
            InvalidInputError: it does not fit, or another rank's does not; the message names the rank, the key, what
                was found and what was expected. Nothing has changed on any rank.
            CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `Reducer.load_state_dict`.
        """
        self.load_with(lambda undo: self.prepare_state(state, undo))

    def load_with(self, prepare: Callable[[Undo], Prepared]) -> None:
        """Load a state with what an integration makes of it: on all ranks, or on none. Collective.

        Args:
            prepare: as `sparsecomm.calls.loading.load` takes it; it calls `prepare_state`.
        """
        inner = [f"reducers[{i}].{key}" for i in range(len(self.reducers)) for key in COMMON]
        load(self._connect(), "LocalSteps", [*states.COMMON, *inner], prepare)

    def prepare_state(self, state: Mapping[str, Any], undo: Undo) -> Prepared:
        """Convert and check a state, for `load_with`. Nothing is sent.

        Args:
            undo: to which is appended what gives the outer optimizer back its state; nothing else has changed.

        Raises:
            InvalidInputError: `load_state_dict` would not take it.
        """
        ranks = self._idle("load_state_dict")
        if not all(exchange.ended for exchange in self._exchanges.values()):
            raise InvalidInputError(f"rank {ranks.rank}: load_state_dict with an exchange under way; call finish first")
        shared, outer = self._globals, self._outer
        args = self.fragments, self._schedule, outer is not None, ranks.rank, ranks.size
        found = states.prepare(state, shared.specs, *args)
        inner = [reducer.prepare_state(each) for reducer, each in zip(self.reducers, found["reducers"], strict=True)]
        exchanges = {i: (round_no, means and shared.from_host(means)) for i, round_no, means in found["exchanges"]}
        parameters = shared.from_host(found["global_parameters"])
        found["outer"] = None if outer is None else load_outer(outer, found["outer"], shared.specs, undo)
        common = {key: found[key] for key in states.COMMON}
        for i, each in enumerate(inner):
            common |= {f"reducers[{i}].{key}": value for key, value in each.common.items()}

        def commit() -> None:
            for each in inner:
                each.commit()
            shared.set(parameters)
            self._taken = found["round"] * self._schedule.sync_every + found["local_step"]
            self._compared.update(range(len(self.fragments)))
            self._exchanges = {i: FragmentExchange(i, *rest) for i, rest in exchanges.items()}

        return Prepared(common, commit)

    # -- other ranks --------------------------------------------------------------------------------------------------

    def rebuild(self, comm: transport.Comm, parameters: Mapping[str, object], *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, such as `shrink` or `grow` returned. Collective over them.

        Exchanges under way are ended: those that have come are applied, those that failed are in the residuals. Then
        all ranks get the global parameters and the outer optimizer's state of the lowest rank that is not new, and the
        place in the round of the one that has come furthest. Survivors keep their residuals, and their local
        parameters, with what they did in this round. If it fails, because one more rank died, shrink, and call it
        again.

        Args:
            comm: as of the constructor.
            parameters: the local ones. Those of a new rank are set to the global ones.
            joining: this rank is new. One rank at least must not be.

        Returns:
            Who was lost and who joined, and what is gone with the lost: see `Reducer.rebuild`. ``step`` is the round,
            and ``steps_apart`` is in local steps.

        Raises:
            InvalidInputError: all ranks join, ``comm`` or ``parameters`` cannot be used; or the outer optimizer's state
                is not made of arrays and plain values, or a rank cannot load it. All ranks raise it, before they have
                changed anything.
            CollectiveMismatchError: a rank has another model, other settings or another version of the library; the
                message says which, and in what it differs.
            TransportError: a rank did not answer, or died.
        """
        self._globals.check(parameters, self._globals.specs)
        with suppress(SparseCommError):
            LocalSteps.finish(self, parameters)  # that of JAX takes a tree
        self._exchanges, self._due = {}, deque()
        ranks, specs = transport.of(comm), self._globals.specs
        outer = SharedState(self._outer, specs)
        words = [*self._settings, outer.nbytes]
        members = compared_members(ranks, self._comm, joining, self._taken, words)
        root = members.lead
        outer.broadcast(ranks, root, members.all[root].words[-1])
        for reducer in self.reducers:
            reducer.rebuild(comm, joining=joining)
        self._globals.broadcast(ranks, root)
        if joining:
            for name in specs:
                with self._globals.on_stream(name, parameters[name], writable=self._in_place) as local:
                    self._write(name, local, self._globals[name])
        self._taken = max(member.step for member in members.stay)
        self._compared.update(range(len(self.fragments)))
        self._comm = ranks
        elements, steps = sum(spec.size for spec in specs.values()), self._schedule.sync_every
        return members.rebuilt(elements, steps_of_unit=steps, unit="round")

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def _go_on(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Begin and apply what is due. Return the names of parameters that were replaced."""
        errors: list[BaseException] = []
        while self._due:
            fragment, round_no = self._due[0]
            if round_no is not None:
                self._begin(fragment, round_no, parameters)
            elif (exchange := self._exchanges.get(fragment)) is not None:
                names = self._apply(exchange, parameters)
                self._replaced += names
                if exchange.error is not None:
                    errors.append(exchange.error)
                del self._exchanges[fragment]
            self._due.popleft()
        if errors:
            raise errors[0]
        replaced = tuple(dict.fromkeys(self._replaced))
        self._replaced = []
        return replaced

    def _begin(self, fragment: int, round_no: int, parameters: Mapping[str, object]) -> None:
        """Begin an exchange, and push the pseudo-gradients of its fragment that have not been pushed."""
        names, shared = self.fragments[fragment], self._globals
        exchange = self._exchanges.get(fragment)
        if exchange is None:
            checksum = 0 if fragment in self._compared else shared.checksum(names)
            steps = self._schedule.steps_between(fragment, round_no)
            ranks, reducer = self._connect(), self.reducers[fragment]
            exchange = FragmentExchange.begun(fragment, round_no, ranks, reducer, steps, checksum)
            self._exchanges[fragment] = exchange
            self._compared.add(fragment)
        for name in filter(exchange.lacks, names):
            with shared.on_stream(name, parameters[name]) as local:
                if name not in exchange.means:
                    exchange.means[name] = shared.difference(name, local)
                exchange.push(name, shared.specs[name].shape)

    @default_float_mode
    def _apply(self, exchange: FragmentExchange, parameters: Mapping[str, object]) -> list[str]:
        """Wait for an exchange and apply it. Return the names of parameters that were replaced."""
        exchange.wait()
        names = list(self.fragments[exchange.fragment])
        if exchange.usable:
            self._step_outer(exchange, [name for name in names if name not in exchange.applied], parameters)
        elif exchange.error is None:
            _log.warning(
                "rank %s: round %s, fragment %s was not applied, since a pseudo-gradient was not finite on some rank",
                self._connect().rank,
                exchange.round,
                exchange.fragment,
            )
            names += [name for name in self._globals.specs if name not in names and not self._finite(name, parameters)]
        alpha = self._alpha if exchange.usable else 0.0
        for name in names:
            if name not in exchange.written:
                with self._globals.on_stream(name, parameters[name], writable=self._in_place) as local:
                    self._write(name, local, self._globals.mixed(name, local, alpha))
                    exchange.written.add(name)
        return names

    def _step_outer(self, exchange: FragmentExchange, names: list[str], parameters: Mapping[str, object]) -> None:
        """Change global parameters by the means of an exchange, and note which."""
        outer, shared, means = self._outer, self._globals, exchange.means
        together = getattr(outer, "step_together", None)
        try:
            with Streams(shared.on_stream(name, parameters[name]) for name in names):
                if together is not None and names:
                    together({name: (shared[name], means[name]) for name in names})
                    exchange.applied.update(names)
                    return
                for name in names:
                    parameter = shared[name]
                    if outer is None:
                        parameter -= means[name]
                    else:
                        outer.step(name, parameter, means[name])
                    exchange.applied.add(name)
        except BaseException:
            if outer is not None and type(outer) is not NesterovSGD:  # which makes its whole step, or none
                self._compared.discard(exchange.fragment)
            raise

    def _write(self, name: str, local: interop.Tensor, values: Array) -> None:
        """Set a local parameter to these values, rounded to its type; on the stream where it is ready."""
        self._globals.write(local, values)

    def _finite(self, name: str, parameters: Mapping[str, object]) -> bool:
        with self._globals.on_stream(name, parameters[name]) as local:
            return self._globals.finite(local)

    def _names(self, fragments: Iterable[int]) -> list[str]:
        return [name for fragment in fragments for name in self.fragments[fragment]]

    def _connect(self) -> transport.Transport:
        self._comm = ranks = transport.of(self._comm)  # that of a transport is itself
        return ranks

    def _idle(self, doing: str) -> transport.Transport:
        ranks = self._connect()
        if self._due:
            raise InvalidInputError(
                f"rank {ranks.rank}: {doing} after an interrupted step; call finish first, with the local parameters"
            )
        return ranks
