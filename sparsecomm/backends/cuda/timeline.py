"""The order of work on memory that several streams use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparsecomm.backends.cuda.runtime import Event, Runtime
from sparsecomm.tensors.interop import Tensor

__all__ = ["CudaTimeline"]


class CudaTimeline:
    """A `sparsecomm.backends.base.Timeline`: an event stands where its work ends so far."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._end: Event | None = None

    @contextmanager
    def on_stream(self, x: Tensor | None) -> Iterator[None]:
        with self._runtime.on_stream(x.stream if x else None):
            if self._end is not None:
                self._runtime.follow(self._end)
            try:
                yield
            finally:
                self._end = self._runtime.record()

    def wait(self) -> None:
        if self._end is not None:
            self._end.wait()
