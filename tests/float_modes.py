"""Floating-point modes of the processor, and NumPy's error modes, that a program may set in a thread."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

__all__ = ["MODES", "in_mode"]

# The offset of the control word in glibc's femode_t, and its bits for two modes: denormals are zero, as after
# `torch.set_flush_denormal(True)`, and results are rounded up.
_OFFSET, _BITS = {
    "x86_64": (4, {"flush": 0x8040, "upward": 0x4000}),
    "aarch64": (0, {"flush": 1 << 24, "upward": 1 << 22}),
}.get(platform.machine(), (0, {}))
MODES = ("flush", "upward", "raise", "warn")  # the last two are NumPy's; pytest makes warnings errors


@contextmanager
def in_mode(name: str) -> Iterator[None]:
    """Set a mode of `MODES` in this thread, and check that it is still set at the end."""
    if name in ("raise", "warn"):
        with np.errstate(all=name):
            expected = np.geterr()
            yield
            assert np.geterr() == expected, "the caller's errstate was changed"
        return
    try:
        libm = ctypes.CDLL("libm.so.6")
        get, set_ = libm.fegetmode, libm.fesetmode
        bits = _BITS[name]
    except (OSError, AttributeError, KeyError):
        pytest.skip("no glibc of an architecture that is known")
    mode = (ctypes.c_uint8 * 16)()
    word = ctypes.c_uint32.from_buffer(mode, _OFFSET)
    get(mode)
    before = bytes(mode)
    word.value |= bits
    set_(mode)
    try:
        one, tiny = np.ones(1, np.float32), np.full(1, 1e-40, np.float32)
        assert (tiny * one == 0) if name == "flush" else (one + tiny > one), "the mode could not be set"
        yield
        get(mode)
        assert word.value & bits == bits, "the caller's mode was changed"
    finally:
        set_(before)
