"""Registers the hook of this library at density 1.0 on every model in DistributedDataParallel.

Also replaces GPUs with CPU tensors for tests that require two GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from sparsecomm.torch import register

exchanged = 0  # steps of our hook in this process


def install() -> None:
    """Register the hook before the first forward pass of every model in DistributedDataParallel that has no other hook.

    The constructor would be too early, since some programs register their own hook after it. ``join`` registers it,
    too, because a rank without a batch makes no forward pass.
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


# -- GPUs -------------------------------------------------------------------------------------------------------------

GPUS = 2


@contextmanager
def gpus_are_cpus(rank: int) -> Any:
    """Replace GPUs with CPU memory for the rest of this process, which is rank ``rank``."""
    common: Any = common_distributed
    common.TEST_XPU = True  # only the conditions of tests read it
    torch.xpu.device_count = lambda: GPUS
    replacements: dict[str, Callable[..., Any]] = {
        "set_device": lambda *_: None,
        "current_device": lambda: rank,
        "synchronize": lambda *_, **__: None,
        "device_count": lambda: GPUS,
        "empty_cache": lambda: None,
        "device": lambda *_: nullcontext(),
        "current_stream": lambda *_: None,
        "get_device_properties": lambda *_: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    module: Any = torch.nn.Module
    move = module.to
    module.to = lambda self, *where, **options: move(self, *map(_on_cpu, where), **_options_on_cpu(options))
    module.cuda = lambda self, *_, **__: self
    ignore_device_ids()
    with _OnCpu():
        yield


def ignore_device_ids() -> None:
    """Let DistributedDataParallel wrap models in CPU memory although a program names GPUs."""
    ddp: Any = DistributedDataParallel
    wrap = ddp.__init__

    def wrap_on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **options: Any
    ) -> None:
        wrap(self, module, None, None, *rest, **options)

    ddp.__init__ = wrap_on_cpu


class _OnCpu(TorchFunctionMode):
    """Makes and moves tensors in CPU memory wherever a GPU is named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = _options_on_cpu(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if func is torch.Tensor.to:
            args = args[:1] + tuple(map(_on_cpu, args[1:]))
        if func is torch.ones and args[-2:] == (1000, 1000):
            args = (*args[:-2], 50, 50)  # smaller images: their convolutions on CPUs would take an hour
        return func(*args, **options)


def _on_cpu(where: Any) -> Any:
    of_gpu = isinstance(where, torch.device) and where.type == "cuda"
    of_gpu = of_gpu or (isinstance(where, str) and where.startswith("cuda"))
    return torch.device("cpu") if of_gpu or type(where) is int else where


def _options_on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": _on_cpu(options["device"])} if "device" in options else options
