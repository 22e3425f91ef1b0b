from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from sparsecomm.backends.base import Backend

_F = TypeVar("_F", bound=Callable[..., Any])

class Scratch:
    """Memory that the backends of one owner reuse from call to call."""

    def release(self, keep: int) -> None: ...

AT_ONCE: AbstractContextManager[None]

class CpuBackend(Backend):
    """`sparsecomm.backends.base.Backend` for host memory, with ``threads`` threads and memory from ``scratch``."""

    threads: int
    def __init__(self, threads: int | None = None, scratch: Scratch | None = None) -> None: ...

def simd() -> str: ...
def use_simd(name: str) -> bool: ...
def default_float_mode(function: _F) -> _F: ...
def float_mode_only(function: _F) -> _F: ...
