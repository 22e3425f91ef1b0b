"""The exchange of gradients as backward passes make them, by hooks of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sparsecomm.calls.loading import Prepared, Undo
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.torch.parameters import Comm, Parameters, queue_callback
from sparsecomm.torch.shards import gradient_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Exchange", "check_free"]


class Exchange:
    """The exchange between backward passes and steps, which ends when the last object that has it is gone.

    Attributes:
        attached: until `remove`.
        exchanging: false within `no_sync`.
        exchanged: gradients are means, and no step has used them.
        divided: a step has raised while it used means: weights may have changed in part.
    """

    def __init__(
        self, parameters: Parameters, passes: int = 1, *, held: Callable[[torch.Tensor], bool] = lambda parameter: False
    ) -> None:
        """Begin it.

        Args:
            parameters: whose gradients are exchanged.
            passes: backward passes that add up before.
            held: says of a parameter whether its gradient is only to be added to in this pass.
        """
        self.parameters, self._passes, self._held = parameters, passes, held
        self.attached = True
        self._passed = 0  # backward passes since the last exchange
        self._pass: int | None = None  # the backward pass that has begun, as autograd numbers them
        self.exchanging = True
        self.exchanged = False
        self.divided = False
        ready = weakref.WeakMethod(self._ready)

        def hook(parameter: torch.Tensor) -> None:
            if (method := ready()) is not None:
                method(parameter)

        named = list(parameters.named.values())
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter in named
        ]
        weakref.finalize(self, _remove, self._hooks).atexit = False
        for parameter in named:
            _exchanges[parameter] = weakref.ref(self)

    def remove(self) -> None:
        """End it."""
        self.attached = False
        _remove(self._hooks)
        for parameter in self.parameters.named.values():
            _exchanges.pop(parameter, None)

    def synchronize(self) -> Step:
        """Replace all gradients by means. Collective; raises what `Reducer.wait` does.

        After an interrupt it may be called again, and goes on, until the exchange has ended.
        """
        self.check_whole()
        parameters = self.parameters
        for name, parameter in parameters.missing:
            gradient = gradient_of(parameter)
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
                parameters.push(name, None, parameter.grad)
            else:
                parameters.push(name, gradient)
        return parameters.wait(self._note_end)

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

    def load_with(self, prepare: Callable[[Undo], Prepared], keys: Iterable[str] = ()) -> None:
        """Load a state: see `Parameters.load_with`. Weights are whole then, and no pass is under way. Collective."""

        def all_prepared(undo: Undo) -> Prepared:
            prepared = prepare(undo)

            def commit() -> None:
                prepared.commit()
                self._pass, self._passed, self.exchanged, self.divided = None, 0, False, False

            return Prepared(prepared.common, commit)

        self.parameters.load_with(all_prepared, keys)

    def _note_end(self) -> None:
        ended_well = self.parameters.reducer.last is not None
        self._pass, self._passed, self.exchanged = None, 0, ended_well

    def rebuild(self, comm: Comm, *, joining: bool) -> Rebuilt:
        """Go on with other ranks, in the next backward pass."""
        rebuilt = self.parameters.rebuild(comm, joining=joining)
        self._pass, self._passed = None, 0
        if unsummed := self.parameters.unsummed:
            for name, parameter in self.parameters.named.items():
                if name in unsummed:
                    parameter.grad = torch.zeros_like(parameter)
            self.exchanged = True  # as far as it could be
        return rebuilt

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within it only add to this rank's gradients: on all ranks, for the same passes."""
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before

    def _ready(self, parameter: torch.Tensor) -> None:
        """Take note that a backward pass has added to a gradient; exchange it if it is complete."""
        if not self.exchanging or self._held(parameter):
            return
        self.check_whole()
        this = torch._C._current_graph_task_id()
        if self._pass is None:
            self._pass, self.exchanged = this, False
            queue_callback(self._end_of_pass)
        elif self._pass != this:
            raise InvalidInputError(
                "a backward pass has begun before the one before it ended. Either that one failed: call "
                "synchronize(), which exchanges what there is, before you go on. Or this one is within it, "
                "as in reentrant activation checkpointing: use use_reentrant=False"
            )
        if self._passed + 1 == self._passes:
            self.parameters.push(self.parameters.name_of(parameter), gradient_of(parameter))

    def _end_of_pass(self) -> None:
        if self._passed + 1 == self._passes:
            self.synchronize()
        else:
            self._pass, self._passed = None, self._passed + 1


def check_free(parameters: Parameters) -> None:
    """Check that nobody exchanges the gradients of these parameters yet.

    Raises:
        InvalidInputError: somebody does.
    """
    for name, parameter in parameters.named.items():
        other = _exchanges.get(parameter)
        if other is not None and other() is not None:
            raise InvalidInputError(
                f"named_parameters: the gradient of {name} is exchanged by another DistributedOptimizer, or by "
                "register_fsdp, already; call its remove() first"
            )


_exchanges: MutableMapping[torch.Tensor, weakref.ref[Exchange]] = WeakIdKeyDictionary()


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
