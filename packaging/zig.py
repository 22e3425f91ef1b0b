"""Compilers for other machines and older systems: zig's clang, which brings the headers and stubs of every glibc."""

from __future__ import annotations

import shlex
from pathlib import Path

REQUIREMENT = "ziglang"


def compilers(python: Path, machine: str, glibc: str, cpu: str, cache: Path) -> dict[str, str]:
    """Return the variables by which setuptools compiles with zig, and strips what it links.

    Args:
        python: an interpreter that has ziglang.
        machine: the architecture, as Python's platform names it.
        glibc: the oldest version that the modules are to run with.
        cpu: what modules may use, as zig names it.
        cache: a folder.
    """
    target = f"-target {machine}-linux-gnu.{glibc} -mcpu={cpu}"
    cc, cxx = (f"{shlex.quote(str(python))} -m ziglang {language} {target}" for language in ("cc", "c++"))
    caches = {name: str(cache) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    return {"CC": cc, "CXX": cxx, "LDSHARED": f"{cc} -shared -s", "LDCXXSHARED": f"{cxx} -shared -s", **caches}
