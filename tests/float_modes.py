"""Modes of the processor's arithmetic, and of NumPy's, that a program or a library may have set in a thread."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

__all__ = ["MODES", "in_mode"]

# Where the word is in glibc's femode_t, and its bits: denormals are zero, as after `torch.set_flush_denormal(True)`;
# results are rounded up.
_OFFSET, _BITS = {
    "x86_64": (4, {"flush": 0x8040, "upward": 0x4000}),
    "aarch64": (0, {"flush": 1 << 24, "upward": 1 << 22}),
}.get(platform.machine(), (0, {}))
MODES = ("flush", "upward", "raise", "warn")  # the last two are NumPy's; pytest makes warnings errors


@contextmanager
def in_mode(name: str) -> Iterator[None]:
    """Set a mode of `MODES` in this thread. It must still be set at the end, as what is called must leave it alone."""
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
