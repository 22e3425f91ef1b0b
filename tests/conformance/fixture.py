"""Switches this library in: its hook at density 1.0 on every model in DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.torch import SparseAdamW, register

exchanged = 0  # steps of our hook in this process


def install() -> None:
    """Register the hook on every model in DistributedDataParallel that has no other, before its first forward pass.

    Not in its constructor: some programs register a hook of their own after it. Also in ``join``: a rank without any
    batch makes no forward pass.
    """
    cls: Any = DistributedDataParallel

    def with_ours(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *inputs: Any, **keywords: Any) -> Any:
            if not getattr(self, "_has_hook", False):
                register(self, 1.0, on_step=_count)
            return method(self, *inputs, **keywords)

        return call

    def marked(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            self._has_hook = True
            return method(self, *arguments, **keywords)

        return call

    cls.forward, cls.join = with_ours(cls.forward), with_ours(cls.join)
    cls.register_comm_hook = marked(cls.register_comm_hook)
    cls._register_fused_optim = marked(cls._register_fused_optim)
    cls._register_builtin_comm_hook = marked(cls._register_builtin_comm_hook)


def _count(step: int, numbers: dict[str, float]) -> None:
    global exchanged
    exchanged += 1


def install_adamw() -> None:
    """Put `SparseAdamW` at density 1.0 in the place of `torch.optim.AdamW`; it gets names for parameters without."""

    class AdamW(SparseAdamW):
        def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
            named = [(str(i), parameter) for i, parameter in enumerate(params)]
            super().__init__(named, *arguments, density=1.0, wire="packed", **options)

    torch.optim.AdamW = AdamW  # type: ignore[misc]
