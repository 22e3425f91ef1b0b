"""Local steps, which a training loop calls after each step of its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsecomm import transport
from sparsecomm.local_steps.outer import OuterOptimizer
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.layout import NamedTensors
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.tensors.arrays import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalSteps"]


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

    What is not sent waits in residuals, and is the momentum of SparseLoCo (Sarfi et al., 2025, Algorithm 1) with the
    defaults here: 64 entries of each chunk of 4,096, residuals that decay by 0.95, and no outer optimizer.

    **Schedule.** A round is ``sync_every`` local steps. Fragment i of F is synchronised after local step
    (i + 1) * sync_every // F of each round, each fragment once, in the same order on all ranks. With a delay of d its
    exchange begins d local steps before (in the first round, after the first step at the earliest), goes on beside the
    local steps, and is applied at the same step as without.

    **Errors.** `step`, `finish` and `load_state_dict` raise the errors of an exchange where it would be applied. It then
    counts for nobody: the outer optimizer makes no step, the fragment's parameters are set to the global ones, and the
    pseudo-gradient is in the residuals, which the next exchange sends. The local step has been counted, and `step` may
    be called again after the next one. So ranks that catch the error go on alike.

    **NaN.** With ``skip_nonfinite`` the same holds, without an error, if a pseudo-gradient was not finite on any rank.
    Finite ones wait in the residuals, others are dropped. Parameters of other fragments that are not finite are set to
    the global ones, too. Reset the inner optimizer's state where it holds NaN.

    **Checkpoints.** `state_dict` holds the global parameters, the residuals, and what an exchange under way has brought.
    The local parameters, which differ between ranks in the middle of a round, and the inner optimizer's state are yours
    to save, on each rank.

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
        options: of the `Reducer`, with other defaults: ``scope="chunk"``, ``decay=0.95``, ``op="mean"``.

    Attributes:
        local_step: how many local steps of this round have been taken.
        round: its number, from 0.
        reducers: one for each fragment.
        fragments: the names of each.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    local_step: int
    round: int
    reducers: tuple[Reducer, ...]
    fragments: tuple[tuple[str, ...], ...]

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
    ) -> None: ...

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

    def finish(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Wait for the exchanges that are under way, and apply them now. Begin none.

        Returns, Raises: as `step`.
        """

    def global_parameters(self) -> dict[str, Array]:
        """Return the global parameters: views of their shapes, in float32 (float64 for float64), on their devices.

        They change with every exchange, and are the model to evaluate and to save.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on as if it had not stopped: NumPy arrays, numbers, lists and texts.

        Also in the middle of a round. An exchange under way is waited for, and what it brought is in the state, to be
        applied where it is due; an error of it is raised there.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank of as many ranks, bit for bit.

        Collective: all ranks load, or none. Load the local parameters and the inner optimizer's state, too.

        Raises:
            InvalidInputError: it does not fit, or another rank's does not; the message says what differs. Nothing has
                changed on any rank.
            CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `Reducer.load_state_dict`.
        """

    def rebuild(
        self, comm: transport.Comm, parameters: Mapping[str, object], *, joining: bool = False
    ) -> Rebuilt:
        """Go on with the ranks of another communicator, such as `shrink` or `grow` returned. Collective over them.

        Exchanges under way are ended: those that have come are applied, those that failed are in the residuals. Then
        all ranks get the global parameters, the outer optimizer's state and the place in the round of the lowest rank
        that is not new. Survivors keep their residuals and their local parameters, with what they did in this round.
        If it fails, because one more rank died, shrink, and call it again.

        Args:
            comm: as of the constructor.
            parameters: the local ones. Those of a new rank are set to the global ones.
            joining: this rank is new. One rank at least must not be.

        Returns:
            Who was lost and who joined, and what is gone with the lost: see `Reducer.rebuild`. ``step`` is the round.

        Raises:
            InvalidInputError: all ranks join, ``comm`` or ``parameters`` cannot be used.
            CollectiveMismatchError: a rank has another model, other settings or another version of the library; the
                message says which, and in what it differs.
            TransportError: a rank did not answer, or died.
        """
