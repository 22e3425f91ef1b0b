"""`AutogradExchange`: an exchange whose gradients are pushed by hooks of autograd."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sparsecomm.errors import InvalidInputError
from sparsecomm.options import Unpack
from sparsecomm.reducer.options import Schedule
from sparsecomm.signals import deferred
from sparsecomm.torch.exchange import ExchangeOptions, GradientExchange, in_compiled_autograd, queue_callback
from sparsecomm.torch.parameters import NamedParameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

# The latest exchange of each parameter, which may have ended.
_exchanges: MutableMapping[torch.Tensor, weakref.ref[AutogradExchange]] = WeakIdKeyDictionary()


@deferred
class AutogradExchange(GradientExchange):
    """From `begin` to `remove`, or until this object is deleted, hooks push gradients as backward passes make them."""

    def __init__(
        self, named: NamedParameters, density: Schedule, *, passes: int = 1, **options: Unpack[ExchangeOptions]
    ) -> None:
        """Check the arguments. ``passes``: the number of backward passes per exchange."""
        super().__init__(named, density, **options)
        self._passes = passes
        self._hooks: list[RemovableHandle] = []
        self._passes_done = 0  # backward passes since the last exchange
        self._pass_id: int | None = None  # autograd's id of the current backward pass
        self.attached = False  # True from `begin` to `remove`
        self.exchanging = True  # False within `no_sync`

    def begin(self, *, by_hooks: bool = True) -> None:
        """Begin the exchange. With ``by_hooks``, backward passes push gradients; otherwise only `synchronize` does."""
        for name, parameter in self.named.items():
            other = _exchanges.get(parameter, lambda: None)()
            if other is not None and other.attached:
                raise InvalidInputError(
                    f"named_parameters: the gradient of {name} is exchanged already, by a SparseAdamW, a "
                    "DistributedOptimizer or register_fsdp; call its remove() first"
                )
        ready = weakref.WeakMethod(self._gradient_ready)

        @deferred
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
        """End the exchange."""
        self.attached = False
        _remove(self._hooks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes only add to this rank's gradients. Use it on all ranks for the same passes."""
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        """Push a gradient of the last backward pass before an exchange."""
        if not self.exchanging:
            return
        self.check_consistent()
        if in_compiled_autograd():
            self.exchanged = False
            self._leave_to_step()
            return
        this = torch._C._current_graph_task_id()
        if self._pass_id is None:
            queue_callback(self._end_pass)
            self._pass_id, self.exchanged = this, False
        elif self._pass_id != this:
            raise InvalidInputError(
                "a backward pass began before the previous one ended. If the previous one failed, call synchronize() "
                "first, which exchanges the gradients it has made. If they are nested, as in reentrant activation "
                "checkpointing, use use_reentrant=False"
            )
        if self._passes_done + 1 == self._passes:
            gradient = self._gradient_of(parameter)
            assert gradient is not None
            self.push(self.name_of(parameter), gradient)

    def _leave_to_step(self) -> None:
        """Leave the exchange to the optimizer's step: compiled autograd does not say when a backward pass ends."""
        warnings.warn(
            "compiled autograd runs the backward passes, so gradients become means only in step() or synchronize(): if "
            "you clip gradients, read them or use a GradScaler, call synchronize() after backward()",
            stacklevel=2,
        )

    @deferred
    def _end_pass(self) -> None:
        if self._passes_done + 1 == self._passes:
            self.synchronize()
        else:
            self._pass_id, self._passes_done = None, self._passes_done + 1

    def _reset(self, *, exchanged: bool) -> None:
        super()._reset(exchanged=exchanged)
        self._pass_id, self._passes_done = None, 0


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
