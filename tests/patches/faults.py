"""File system faults for tests of publishers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class CrashError(BaseException):
    """Simulates the death of a publisher: its clean-up fails, too."""


class Operations:
    """Counts operations on files, and lets one fail; after a crash, all later ones fail, too."""

    def __init__(self, fail_at: int, *, crash: bool, after: bool) -> None:
        """``after``: the operation takes effect before it fails."""
        self.done = 0
        self._fail_at, self._crash, self._after = fail_at, crash, after

    def around(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            number, self.done = self.done, self.done + 1
            fails = number == self._fail_at
            result = operation(*args, **kwargs) if number < self._fail_at or (fails and self._after) else None
            if fails or (self._crash and number > self._fail_at):
                if result is not None and hasattr(result, "close"):
                    result.close()
                raise CrashError if self._crash else OSError(errno.ENOSPC, "No space left on device")
            return operation(*args, **kwargs) if number > self._fail_at else result

        return counted


@contextmanager
def failing(fail_at: int, *, crash: bool = False, after: bool = False) -> Iterator[Operations]:
    """Let operation ``fail_at`` on files fail: opening, making durable, renaming, listing or deleting."""
    operations = Operations(fail_at, crash=crash, after=after)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "open"), (Path, "unlink"), (Path, "iterdir")):
            patch.setattr(owner, name, operations.around(getattr(owner, name)))
        yield operations
