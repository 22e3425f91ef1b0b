"""Check on import that the processor supports this build, because an unsupported instruction would end the process.

`sparsecomm` imports this module first. The wheels for x86-64 are compiled for x86-64-v2.
"""

from __future__ import annotations

import os

from sparsecomm.processor import _features

if names := _features.missing():
    raise ImportError(
        f"this build of sparsecomm needs a processor with {', '.join(names)}, which the processor of "
        f"{os.uname().nodename} does not support. The released wheels require x86-64-v2, which Intel and AMD "
        "processors have supported since 2011. A virtual machine may hide it: give it the host's CPU model. Otherwise "
        "build sparsecomm on this machine, which requires a C++ compiler: "
        "pip install --force-reinstall --no-deps FOLDER, a checkout or the unpacked sdist"
    )
