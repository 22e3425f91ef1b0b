"""The exchange of gradients as backward passes make them, by hooks of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.loading import Prepared
from sparsecomm.states.schema import State
from sparsecomm.torch.parameters import NamedParameters, Parameters, is_zero, queue_callback
from sparsecomm.torch.shards import gradient_of, local
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Exchange"]

# The exchange of each parameter that has, or had, one.
_exchanges: MutableMapping[torch.Tensor, weakref.ref[Exchange]] = WeakIdKeyDictionary()


class Exchange(Parameters):
    """Parameters whose gradients are exchanged between backward passes and steps, from `begin` on.

    It ends with `remove`, or when the last object that has it is gone. This module is compiled, as `Parameters`.

    Attributes:
        attached: from `begin` to `remove`.
        exchanging: false within `no_sync`.
        exchanged: gradients are means, and no step has used them.
        divided: a step has raised while it used means: weights may have changed in part.
    """

    def __init__(self, named: NamedParameters, density: Schedule, *, passes: int = 1, **settings: Any) -> None:
        """Check the arguments.

        Args:
            named, density, settings: as in `Parameters`.
            passes: backward passes that add up before.
        """
        super().__init__(named, density, **settings)
        self._passes = passes
        self._hooks: list[RemovableHandle] = []
        self._passed = 0  # backward passes since the last exchange
        self._pass: int | None = None  # the backward pass that has begun, as autograd numbers them
        self._made: dict[str, torch.Tensor] = {}  # memory for means of parameters without a gradient on this rank
        self.attached, self.exchanging = False, True
        self.exchanged = self.divided = False

    def begin(self, *, by_hooks: bool = True) -> None:
        """Begin it.

        Args:
            by_hooks: gradients are pushed as backward passes make them; otherwise `synchronize` does all.

        Raises:
            InvalidInputError: the gradient of a parameter is exchanged already.
        """
        for name, parameter in self.named.items():
            other = _exchanges.get(parameter, lambda: None)()
            if other is not None and other.attached:
                raise InvalidInputError(
                    f"named_parameters: the gradient of {name} is exchanged by another DistributedOptimizer, or by "
                    "register_fsdp, already; call its remove() first"
                )
        ready = weakref.WeakMethod(self._ready)

        def hook(parameter: torch.Tensor) -> None:
            if (method := ready()) is not None:
                method(parameter)

        weakref.finalize(self, _remove, self._hooks).atexit = False
        for parameter in self.named.values():
            if by_hooks:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            _exchanges[parameter] = weakref.ref(self)
        self.attached = True

    def remove(self) -> None:
        """End it."""
        self.attached = False
        _remove(self._hooks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within it only add to this rank's gradients: on all ranks, for the same passes."""
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before

    def synchronize(self) -> Step:
        """Replace all gradients by means. Collective; raises what `Reducer.wait` does.

        A parameter that is frozen, or has no gradient on this rank, gets the mean if another rank has a gradient for
        it; otherwise ``p.grad`` stays as it is.

        After an interrupt it may be called again, and goes on.
        """
        self.check_whole()
        seen: set[int] = set()
        for name, parameter in self.named.items():
            if not self.reducer.pushed(name):
                gradient = self._own_memory(parameter, seen) if parameter.requires_grad else None
                if gradient is None:
                    self._made[name] = made = torch.empty_like(parameter)
                    self.push_nothing(name, made)
                elif gradient.layout is torch.strided and is_zero(local(gradient)):
                    self.push_nothing(name, gradient)
                else:
                    self.push(name, gradient)
        return self.wait()

    def _own_memory(self, parameter: torch.Tensor, seen: set[int]) -> torch.Tensor | None:
        """Return the gradient of a parameter, which is replaced by a copy if the mean cannot be written to it.

        Programs set gradients whose elements share memory (`torch.autograd.grad` of a sum returns such), or give two
        parameters the same one.

        Args:
            seen: addresses of gradients, to which this one is added.
        """
        gradient = gradient_of(parameter)
        if gradient is None or gradient.layout is not torch.strided:
            return gradient
        shard = local(gradient)
        shared = any(stride == 0 and size > 1 for stride, size in zip(shard.stride(), shard.shape, strict=True))
        if shared or (shard.numel() and shard.data_ptr() in seen):
            copied = torch.zeros_like(parameter)
            local(copied).copy_(shard)
            parameter.grad = gradient = copied
        seen.add(local(gradient).data_ptr())
        return gradient

    def check_whole(self) -> None:
        """Check that no step was divided.

        Raises:
            InvalidInputError: one was.
        """
        if self.divided:
            raise InvalidInputError(
                "the optimizer's step before this one was interrupted, or failed, while it changed weights, which may "
                "differ between ranks now; load a checkpoint on all ranks, by load_state_dict()"
            )

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with other ranks, in the next backward pass. What the last step had of means counts as exchanged."""
        rebuilt = super().rebuild(comm, joining=joining)
        self._pass, self._passed, self._made = None, 0, {}
        self.exchanged = self.exchanged or bool(self.reducer.unsummed)
        return rebuilt

    def prepare_state(self, state: State) -> Prepared:
        """Convert and check a state: see `Parameters.prepare_state`. Weights are whole then, and no pass under way."""
        prepared = super().prepare_state(state)

        def commit() -> None:
            prepared.commit()
            self._pass, self._passed, self.exchanged, self.divided = None, 0, False, False

        return Prepared(prepared.common, commit)

    def adopt(self) -> None:
        """Go on with a state of the optimizer that was loaded without this. Weights have been loaded as well."""
        self._checked = None

    # -- a backward pass ----------------------------------------------------------------------------------------------

    def _ready(self, parameter: torch.Tensor) -> None:
        """Take note that a backward pass has added to a gradient; exchange it if it is complete."""
        if self._only_adds(parameter):
            return
        self.check_whole()
        this = torch._C._current_graph_task_id()
        if self._pass is None:
            queue_callback(self._end_pass)
            self._pass, self.exchanged = this, False
        elif self._pass != this:
            raise InvalidInputError(
                "a backward pass has begun before the one before it ended. Either that one failed: call "
                "synchronize(), which exchanges what there is, before you go on. Or this one is within it, "
                "as in reentrant activation checkpointing: use use_reentrant=False"
            )
        if self._passed + 1 == self._passes:
            gradient = gradient_of(parameter)
            assert gradient is not None
            self.push(self.name_of(parameter), gradient)

    def _only_adds(self, parameter: torch.Tensor) -> bool:
        """Return whether this pass only adds to the gradient of a parameter."""
        return not self.exchanging

    def _end_pass(self) -> None:
        if self._passed + 1 == self._passes:
            self.synchronize()
        else:
            self._pass, self._passed = None, self._passed + 1

    def _end_step(self, last: Step | None) -> None:
        made, self._made = self._made, {}
        super()._end_step(last)
        skipped = self.reducer.unsummed if last is None else last.without_gradient
        for name, gradient in made.items():
            if name not in skipped and local(gradient).numel():
                self.named[name].grad = gradient
        self._pass, self._passed, self.exchanged = None, 0, last is not None


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
