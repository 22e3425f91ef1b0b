"""Hybrid FSDP2: shards within groups of ranks, whose gradients are summed sparsely across the groups."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import State, StateDict
from sparsecomm.signatures import with_options
from sparsecomm.torch.exchange import Exchange, check_free
from sparsecomm.torch.parameters import Comm, Parameters, Scaler
from sparsecomm.torch.replicas import Replicas
from sparsecomm.torch.shards import is_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShardedState", "register_fsdp"]


@with_options(ReducerOptions, Reducer.__init__)
def register_fsdp(
    model: nn.Module,
    density: Schedule = 0.001,
    *,
    comm: Comm = None,
    scaler: Scaler | None = None,
    check_weights_every: int | None = 0,
    **options: Unpack[ReducerOptions],
) -> ShardedState:
    """Let a model that FSDP2 shards sum its gradients sparsely across the replicas of its shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        state = sparsecomm.torch.register_fsdp(model, 0.001)

    After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks of what was sent. FSDP sums a gradient
    within the group that shards it, as ever; then each rank exchanges its own shard with the ranks that hold the same
    one, as soon as it is there, beside the backward pass. FSDP's own sum across replicas is switched off.

    The mesh may also be of one dimension: ``fully_shard(model, mesh=mesh["shard"])`` and
    ``comm=mesh["replicate"].get_group()``; so may tensor-parallel dimensions be there besides. Call this after
    `fully_shard`, before the first forward pass. Parameters that are not sharded by it are left alone, as by FSDP.

    A parameter that this rank did not use counts as zeros. Passes within ``state.no_sync()``, and such that
    ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)`` leaves out, only add up.

    Args:
        model: one whose modules `torch.distributed.fsdp.fully_shard` has wrapped, at least one of them.
        density: as in `sparsecomm.Reducer`; of each rank's shards.
        comm: the process group of the ranks that hold the same shards as this one; ``None``: that of the mesh's
            dimension that replicates.
        scaler, check_weights_every: as in `SparseState`; each rank checks its shards. An overflow that only some
            shards have seen makes all scalers skip the step, and drops what the other shards sent in it.
        options: those of `sparsecomm.Reducer`, but not ``clip``. ``op`` is "mean" by default: "sum" is for those who
            have called ``set_gradient_divide_factor``, as FSDP divides by nothing else then.

    Raises:
        InvalidInputError: no module is sharded, the mesh has no replicas and ``comm`` is not given, the ranks of
            ``comm`` hold different shards, or an argument cannot be used.
    """
    replicas = Replicas(model, comm)
    try:
        if replicas.divided and "op" not in options:
            raise InvalidInputError(
                "set_gradient_divide_factor was called, so that FSDP divides gradients by that and by nothing else; "
                "pass op='sum' to do the same here, or op='mean' to divide by the number of replicas besides"
            )
        sharded = [(name, p) for name, p in model.named_parameters() if is_sharded(p)]
        parameters = Parameters(
            sharded,
            density,
            comm=replicas.comm,
            scaler=scaler,
            check_weights_every=check_weights_every,
            summed_here=replicas.summed_here,
            **options,
        )
        check_free(parameters)
    except BaseException:
        replicas.join()
        raise
    return ShardedState(parameters, replicas)


class ShardedState:
    """What `register_fsdp` returns: the exchange of a model's shards across replicas, and what it keeps.

    It goes on as long as this object lives, or until `remove`.
    """

    def __init__(self, parameters: Parameters, replicas: Replicas) -> None:
        """Begin the exchange."""
        self._replicas = replicas
        self._exchange = Exchange(parameters, held=replicas.held)

    def __repr__(self) -> str:
        return f"ShardedState({self._exchange.parameters})"

    @property
    def reducer(self) -> Reducer:
        """The reducer of this rank's shards, with its counters, buckets and residuals. The first use is collective."""
        return self._exchange.parameters.reducer

    def synchronize(self) -> Step:
        """Replace what is in ``p.grad`` now by the mean, for gradients that no backward pass has exchanged. Collective.

        Raises:
            SparseCommError: as `sparsecomm.Reducer.wait`.
        """
        return self._exchange.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes within it only add to this rank's shards: on all ranks, for the same passes.

        FSDP sums within its group all the same, so that no rank has to keep a whole gradient.
        """
        return self._exchange.no_sync()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with other replicas, when some were lost or are new. Collective over ``comm``.

        A shard group that lost a rank is lost as a whole: FSDP cannot go on in it. The others keep their residuals.
        After a backward pass that failed, ``p.grad`` is the mean where the ranks had agreed on it, and zero otherwise.

        Args:
            comm: a process group of the ranks that hold the same shards as this one.
            joining: this rank is new; `broadcast_parameters` gives it weights.

        Raises:
            SparseCommError: as `sparsecomm.Reducer.rebuild`.
        """
        return self._exchange.rebuild(comm, joining=joining)

    def state_dict(self) -> StateDict:
        """Return what `sparsecomm.Reducer.state_dict` does, by parameter; arrays are tensors in host memory."""
        return self._exchange.parameters.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned on this rank: see `sparsecomm.Reducer.load_state_dict`. Collective."""
        self._exchange.load_with(lambda undo: self._exchange.parameters.prepare_state(state))

    def remove(self) -> None:
        """Exchange nothing any more: FSDP sums across the mesh as before. What waits in residuals is dropped."""
        self._exchange.remove()
        self._replicas.join()
