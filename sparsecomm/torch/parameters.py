"""Named parameters that ranks train together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from sparsecomm import transport
from sparsecomm.errors import InvalidInputError
from sparsecomm.signals import deferred
from sparsecomm.tensors import interop
from sparsecomm.torch.shards import HYBRID, check_replicated, compare, described, is_sharded
from sparsecomm.transport import Comm, Transport

__all__ = ["NamedParameters", "TrainedParameters", "parameters_of", "unwrapped_names"]

NamedParameters: TypeAlias = "Iterable[tuple[str, torch.nn.Parameter]]"

# Attributes in which wrappers store the wrapped module, and which are therefore parts of parameter names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@deferred
class TrainedParameters:
    """Named parameters that ranks train together: all ranks hold the same ones, or the same shards of DTensors.

    Attributes:
        named: the parameters that require gradients, by name without prefixes of wrappers.
        comm: the communicator of the ranks.
    """

    def __init__(self, named: NamedParameters, comm: Comm, clip: object = None) -> None:
        """Check the arguments. Nothing is sent.

        Args:
            named: names and parameters. Frozen parameters are only compared between ranks.
            comm: of the ranks.
            clip: as in `Reducer`.

        Raises:
            InvalidInputError: an argument is not supported; or ``clip`` is set with DTensors.
        """
        self.named, self._frozen = _trained_and_frozen(named)
        if refused := [name for name, parameter in self.named.items() if parameter.is_complex()]:
            dtype = self.named[refused[0]].dtype
            raise InvalidInputError(
                f"{refused[0]} is {dtype}; parameters must be real. Train torch.view_as_real() of it, or leave it out "
                "and freeze it"
            )
        self._sharded = any(map(is_sharded, self.named.values()))
        self.check_comm(comm)
        self.comm = comm
        if clip is not None and self._sharded:
            raise InvalidInputError(
                "clip: must be None with DTensors, because each rank knows the norm of its shards only; clip the mean, "
                "by torch.nn.utils.clip_grad_norm_"
            )

    def check_comm(self, comm: Comm) -> None:
        """Check that the ranks of a communicator hold the same shards, as far as meshes tell. Nothing is sent."""
        check_replicated(self.named, comm)

    def connect(self) -> Transport:
        """Return the transport of the ranks. Collective if there are DTensors.

        Raises:
            CollectiveMismatchError: the ranks hold different shards.
        """
        comm = transport.transport_of(self.comm)
        shards = [described(name, parameter) for name, parameter in self.named.items() if is_sharded(parameter)]
        if shards and comm.size > 1:
            compare(
                comm,
                ["shards", *shards],
                f"the ranks of comm hold different shards; rank {comm.rank} has {len(shards)} DTensors, the first of "
                f"them {shards[0]}. Expected ranks that hold the same: {HYBRID}",
            )
        return comm

    def with_frozen(self, tensors: Mapping[str, object]) -> dict[str, object]:
        """Return tensors by name, and the frozen parameters that are not sharded: all must be equal on all ranks."""
        frozen = {name: parameter for name, parameter in self._frozen.items() if not is_sharded(parameter)}
        return {**tensors, **frozen}


def parameters_of(model: object) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters of a model.

    Raises:
        InvalidInputError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidInputError(f"model: got {type(model).__name__}; expected a torch.nn.Module")
    return list(model.named_parameters())


def unwrapped_names(names: Iterable[str]) -> list[str]:
    """Return the names of parameters without the parts that wrappers add.

    These are the parts of `torch.compile`, activation checkpointing and FSDP anywhere in a name, and "module." of
    DistributedDataParallel at the beginning of all names.
    """
    found = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while found and all(name.startswith("module.") for name in found):
        found = [name.removeprefix("module.") for name in found]
    return found


def _trained_and_frozen(named: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pairs = interop.named(named, "named_parameters")
    names = unwrapped_names(name for name, _ in pairs)
    first: dict[int, tuple[str, object]] = {}  # a parameter may have several names
    for name, (_, parameter) in zip(names, pairs, strict=True):
        first.setdefault(id(parameter), (name, parameter))
    trained: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in first.values():
        if not isinstance(parameter, torch.Tensor):
            what = f"{name} is of type {type(parameter).__name__}"
            raise InvalidInputError(f"named_parameters: {what}; expected pairs, as from model.named_parameters()")
        if parameter.requires_grad and name in trained:
            raise InvalidInputError(f"named_parameters: the name {name!r} appears twice; names must be unique")
        (trained if parameter.requires_grad else frozen)[name] = parameter
    if not trained:
        raise InvalidInputError("named_parameters: at least one parameter must require a gradient")
    return trained, frozen
