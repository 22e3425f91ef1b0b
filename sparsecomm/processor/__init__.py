"""Refuses a processor that lacks what the compiled modules may use, before one of them ends the process by SIGILL.

`sparsecomm` imports this module first. The wheels for x86-64 are compiled for x86-64-v2.
"""

from __future__ import annotations

import os

from sparsecomm.processor import _features

__all__: list[str] = []

if names := _features.missing():
    raise ImportError(
        f"this build of sparsecomm needs a processor with {', '.join(names)}, which that of "
        f"{os.uname().nodename} lacks. The released wheels are for x86-64-v2, which Intel's and AMD's "
        "processors are since 2011. A virtual machine may hide it: give it the host's CPU model. Otherwise build "
        "sparsecomm on this machine, which takes a C++ compiler: "
        "pip install --force-reinstall --no-deps FOLDER, a checkout or the unpacked sdist"
    )
