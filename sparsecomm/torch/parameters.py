"""The parameters that ranks train together: `TrainedParameters`, `broadcast_parameters`, and shards of DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.signals import deferred
from sparsecomm.tensors import interop
from sparsecomm.transport import Comm, Transport, group_of, transport_of
from sparsecomm.transport.process_group import ProcessGroupTransport

NamedParameters: TypeAlias = "Iterable[tuple[str, torch.nn.Parameter]]"
# Classes of torch.distributed.tensor, which is slow to import.
DTensor: TypeAlias = Any
DeviceMesh: TypeAlias = Any

# Attributes that hold a wrapped module, and so appear in parameter names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HYBRID = (
    "shard within groups of ranks and replicate across them: mesh = init_device_mesh(device, (replicas, shards), "
    "mesh_dim_names=('replicate', 'shard')), fully_shard(module, mesh=mesh['shard']), and "
    "comm=mesh['replicate'].get_group(); or keep dense sums"
)


@deferred
class TrainedParameters:
    """The named parameters of a model. All ranks of ``comm`` hold the same ones, or the same shards of DTensors."""

    def __init__(self, named: NamedParameters, comm: Comm, clip: object = None) -> None:
        """Check the arguments; ``clip`` is only checked, and must be ``None`` with DTensors. Nothing is sent."""
        self.model = model_of(named)  # returns the model, or None if it is not known or was deleted
        self.named, self._frozen = _trained_and_frozen(named)  # by name, without the prefixes that wrappers add
        self._owners: list[weakref.ref[Any]] = []  # the model or optimizer that `check_unchanged` looks at
        self._watched: dict[int, torch.Tensor] = {}  # the parameters of the owners at the beginning, by id
        self.sharded = any(map(is_sharded, self.named.values()))
        self.check_comm(comm)
        self.comm = comm
        if clip is not None and self.sharded:
            raise InvalidInputError(
                "clip: must be None with DTensors, because each rank knows only the norm of its own shards; clip the "
                "mean with torch.nn.utils.clip_grad_norm_"
            )

    def check_comm(self, comm: Comm) -> None:
        """Check by the DTensors' meshes that the ranks of ``comm`` hold the same shards. Nothing is sent."""
        _check_replicated(self.named, comm)

    def connect(self) -> Transport:
        """Return the transport. With DTensors, first compare the ranks' shards, which is collective."""
        transport = transport_of(self.comm)
        shards = [_describe(name, parameter) for name, parameter in self.named.items() if is_sharded(parameter)]
        if shards and transport.size > 1:
            try:
                queue_of(transport).call(
                    WordsGather(transport, [], Label.of(("call", "comparison of shards"), *shards))
                )
            except CollectiveMismatchError as error:
                raise CollectiveMismatchError(
                    f"{error}. The ranks of comm hold different shards; pass ranks that hold the same: {_HYBRID}"
                ) from error
        return transport

    def with_frozen(self, tensors: Mapping[str, object]) -> dict[str, object]:
        """Return ``tensors`` and the frozen parameters that are whole and readable: all that must be equal."""
        frozen = {name: p for name, p in self._frozen.items() if not is_sharded(p) and not _unreadable(p)}
        return {**tensors, **frozen}

    def watch(self, *owners: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Let `check_unchanged` also check the parameters of a model, or of an optimizer's groups."""
        self._owners = list(map(weakref.ref, owners))
        self._watched = self._owned()

    def _owned(self) -> dict[int, torch.Tensor]:
        owned: list[torch.Tensor] = []
        for owner in (reference() for reference in self._owners):
            if isinstance(owner, torch.nn.Module):
                owned += owner.parameters()
            elif owner is not None:
                owned += [p for group in owner.param_groups for p in group["params"]]
        return {id(p): p for p in owned}

    def check_unchanged(self) -> None:
        """Check that no parameter has been unfrozen, added or removed since the beginning."""
        changes = [
            f"{name} was frozen, and requires a gradient now" for name, p in self._frozen.items() if p.requires_grad
        ]
        owned, before = self._owned(), self._watched
        known = before.keys() | set(map(id, self.named.values()))
        new = [p for i, p in owned.items() if i not in known and p.requires_grad]
        changes += [f"a parameter of shape {tuple(p.shape)} is new" for p in new]
        removed = before.keys() - owned.keys()
        changes += [f"{name} was removed" for name, p in self.named.items() if id(p) in removed]
        if changes:
            raise InvalidInputError(
                f"{changes[0]}, but the parameters of an exchange are fixed when it begins. On all ranks, call "
                "remove() and wrap the changed model or optimizer again (for DDP: in a new DistributedDataParallel). "
                "To unfreeze a layer later, wrap first and freeze it afterwards"
            )


def model_of(named: object) -> Callable[[], torch.nn.Module | None]:
    """Return a weak reference to the model if ``named`` is its ``named_parameters()``, a generator; else to nothing."""
    module = getattr(getattr(named, "gi_frame", None), "f_locals", {}).get("self")
    return weakref.ref(module) if isinstance(module, torch.nn.Module) else lambda: None


def buffers_of(model: Callable[[], torch.nn.Module | None]) -> dict[str, object]:
    """Return the floating-point buffers of the referenced model by name, such as running means."""
    module = model()
    buffers = () if module is None else module.named_buffers()
    return {name: b for name, b in buffers if not _unreadable(b) and b.is_floating_point() and b.numel()}


def _trained_and_frozen(named: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pairs = interop.named(named, "named_parameters")
    first: dict[int, tuple[str, object]] = {}  # a parameter may have several names
    for name, (_, parameter) in zip(unwrapped_names(name for name, _ in pairs), pairs, strict=True):
        first.setdefault(id(parameter), (name, parameter))
    trained: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in first.values():
        if not isinstance(parameter, torch.Tensor):
            raise InvalidInputError(
                f"named_parameters: {name} is of type {type(parameter).__name__}; pass model.named_parameters()"
            )
        if (parameter.requires_grad or is_lazy(parameter)) and (why := _untrainable(parameter)):
            raise InvalidInputError(f"{name} {why}")
        if parameter.requires_grad and name in trained:
            raise InvalidInputError(f"named_parameters: the name {name!r} appears twice; names must be unique")
        (trained if parameter.requires_grad else frozen)[name] = parameter
    if not trained:
        raise InvalidInputError("named_parameters: at least one parameter must require a gradient")
    return trained, frozen


def _unreadable(tensor: torch.Tensor) -> str:
    """Return why the elements of a tensor cannot be read, or an empty string."""
    if is_lazy(tensor):
        return "is not initialized; run a forward pass first, and broadcast_parameters()"
    if tensor.is_meta:
        return "is on the meta device, without data; move it with to_empty(), or leave it out"
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else tensor.layout
        return f"is {kind}; expected a dense tensor. Convert it, or leave it out"
    return ""


def _unwritable(tensor: torch.Tensor) -> str:
    """Return why the elements of a tensor cannot be written, or an empty string."""
    why = _unreadable(tensor)
    return why or ("has elements that share memory; give each its own, by clone()" if overlaps(local(tensor)) else "")


def _untrainable(parameter: torch.Tensor) -> str:
    if parameter.dtype not in _TRAINABLE:
        advice = "train torch.view_as_real() of it" if parameter.is_complex() else "convert it"
        return f"is {parameter.dtype}; expected float16, bfloat16, float32 or float64; {advice}, or freeze it"
    return _unwritable(parameter)


def parameters_of(model: object) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if not isinstance(model, torch.nn.Module):
        raise InvalidInputError(f"model: got {type(model).__name__}; expected a torch.nn.Module")
    return model.named_parameters()


def unwrapped_names(names: Iterable[str]) -> list[str]:
    """Return parameter names without the parts that wrappers add: `_WRAPPERS` anywhere, "module." at the start."""
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


@deferred
def broadcast_parameters(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root: int = 0, *, comm: Comm = None
) -> None:
    """Copy the tensors of rank ``root`` to all ranks, bit for bit. Collective.

    The ranks first compare names, dtypes and shapes. Each tensor is then sent in one broadcast, by MPI or
    over the connections of the process group's transport. For a tensor on a GPU, the process group itself broadcasts,
    if it has a backend for GPUs.

    Args:
        tensors: ``model.state_dict()`` or ``model.named_parameters()``, of any dtypes and strides; written in place.
            For a DTensor, this rank's shard is written. Objects that are not tensors are ignored.
        root: a rank of ``comm``.
        comm: as in `sparsecomm.sparse_allreduce`.

    Raises:
        InvalidInputError: an argument is not supported.
        CollectiveMismatchError: the ranks' tensors differ in number, names, dtypes or shapes, or ``root`` differs.
            Nothing was written.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died. Some tensors may have been
            written, one of them in part.
    """
    named = [(name, t) for name, t in interop.named(tensors) if isinstance(t, torch.Tensor)]
    _check_replicated(dict(named), comm, summed=False)
    transport = transport_of(comm)
    if not isinstance(root, int) or not 0 <= root < transport.size:
        raise InvalidInputError(f"root={root!r}: must be a rank from 0 to {transport.size - 1}")
    for name, t in named:
        if why := _unwritable(t):
            raise InvalidInputError(f"{name} {why}")
    label = Label.of(("call", "broadcast_parameters()"), ("root", root), *(_describe(name, t) for name, t in named))
    queue_of(transport).call(WordsGather(transport, [], label))
    for _, tensor in named:
        tensor = local(tensor)
        contiguous = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.numel() and transport.size > 1:
            data = contiguous.view(-1).view(torch.uint8)
            if isinstance(transport, ProcessGroupTransport):
                transport.broadcast_tensor(data, root)
            else:
                host = data.cpu()
                transport.broadcast(host.numpy(), root)
                data.copy_(host)
        if contiguous is not tensor:
            tensor.copy_(contiguous)


# -- shards of DTensors -----------------------------------------------------------------------------------------------


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself: detached, not copied."""
    detached: DTensor = tensor.detach()
    shard: torch.Tensor = detached.to_local() if is_sharded(tensor) else detached
    return shard


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `torch.Tensor.expand`."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for stride, size in strides)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, with the parameter's placements.

    Autograd may leave a partial sum on each rank of a mesh (``Partial``). Then this replaces ``parameter.grad`` by the
    sum, which is collective over the mesh.
    """
    p: DTensor = parameter
    if is_sharded(parameter) and p.grad is not None and p.grad.placements != p.placements:
        p.grad = p.grad.redistribute(placements=p.placements)
    return parameter.grad


def _check_replicated(named: Mapping[str, torch.Tensor], comm: Comm, *, summed: bool = True) -> None:
    """Check by the DTensors' meshes that all ranks of ``comm`` hold the same shards. Nothing is sent.

    ``summed``: also check that PyTorch does not already sum the gradients over these ranks.
    """
    group = group_of(comm)
    if not isinstance(group, dist.ProcessGroup):
        return
    ranks = dist.get_process_group_ranks(group)
    who = "all ranks (comm is None)" if comm is None else f"the ranks {ranks} of comm"
    layouts: dict[tuple[DeviceMesh, Any], str] = {}  # mesh and placements: the first parameter that has them
    for name, parameter in named.items():
        if is_sharded(parameter):
            t: DTensor = parameter
            layouts.setdefault((t.device_mesh, t.placements), name)
    for (mesh, placements), name in layouts.items():
        spanned = _dimensions_spanned(mesh, ranks)
        if sharded := [d for d in spanned if not placements[d].is_replicate()]:
            raise InvalidInputError(
                f"{name} is a DTensor, sharded over {_dimension_name(mesh, sharded[0])} of its mesh: {who} hold "
                "different parts of it, so their gradients cannot be summed. Pass ranks that hold the same shard: "
                f"{_HYBRID}"
            )
        if spanned and summed:
            raise InvalidInputError(
                f"{name} is a DTensor, replicated over {_dimension_name(mesh, spanned[0])} of its mesh: PyTorch "
                f"already sums its gradients over {who}, densely and in each step. Leave the dimension out of the "
                f"mesh: {_HYBRID}"
            )


def _dimensions_spanned(mesh: DeviceMesh, ranks: list[int]) -> list[int]:
    """Return the dimensions of a mesh in which some of ``ranks`` have another coordinate than this rank."""
    matches = (mesh.mesh == rank for rank in ranks)
    others = [match.nonzero()[0].tolist() for match in matches if match.any()]
    return [d for d, mine in enumerate(mesh.get_coordinate() or ()) if any(other[d] != mine for other in others)]


def _dimension_name(mesh: DeviceMesh, d: int) -> str:
    return f"dimension {d}" if mesh.mesh_dim_names is None else f"dimension {mesh.mesh_dim_names[d]!r}"


def _describe(name: str, t: DTensor) -> tuple[str, str]:
    """Return a tensor's name; and as text its dtype and shape, and which shard of it this rank has."""
    text = f"{t.dtype} {tuple(t.shape)}"
    if not is_sharded(t):
        return name, text
    mesh = t.device_mesh
    where = [
        f"{placement}: {at} of {mesh.size(d)}"
        for d, (placement, at) in enumerate(zip(t.placements, mesh.get_coordinate() or [], strict=False))
        if not placement.is_replicate()
    ]
    return name, f"{text}, {', '.join(where) or 'whole'}"
