"""What this process runs on: processor, memory and versions."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparsecomm.backends import CpuBackend, _cpu
from sparsecomm.errors import SparseCommError


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or ``None``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def model() -> str:
    """Return the name of the CPU."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def processor() -> str:
    """Describe the CPU and the usable cores."""
    return f"{model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"


def kernels() -> str:
    """Describe the instruction set and the threads of the kernels."""
    try:
        count = CpuBackend().threads
    except SparseCommError as error:  # a setting cannot be read
        return str(error)
    return f"{_cpu.simd()}, {count} thread{'s' * (count != 1)}"


def available_bytes() -> int | None:
    """Return Linux's estimate of the bytes that are available for new allocations."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match[1]) if match else None
