"""Count the files that an addition touches, against what docs/internals/architecture.md promises.

    python docs/recipes.py algorithm REV     the commit REV adds an algorithm
    python docs/recipes.py wire REV          ... a wire format
    python docs/recipes.py device REV        ... a device

Tests and documentation of the addition do not count. Tables that `docs/tables.py` writes do not count either.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess

ALLOWED = {
    "algorithm": ["sparsecomm/algorithms/*.py", "sparsecomm/algorithms/__init__.py", "sparsecomm/testing/oracles.py"],
    "wire": ["sparsecomm/wire/*.py", "sparsecomm/tensors/kinds.py", "kernels/cpu/*", "kernels/cuda/*"],
    "device": [
        "sparsecomm/backends/*/*",
        "sparsecomm/backends/__init__.py",
        "sparsecomm/tensors/interop.py",
        "kernels/*/*",
    ],
}
MAX_FILES = {"algorithm": 3, "wire": 4, "device": None}
NOT_COUNTED = ("tests/*", "docs/*", "*.md", "bench/*")


def touched(revision: str) -> list[str]:
    """Return the files that a commit changes, but for those that are not counted."""
    command = ["git", "diff-tree", "--no-commit-id", "--name-only", "-r", revision]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in NOT_COUNTED)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(ALLOWED))
    parser.add_argument("revision")
    asked = parser.parse_args()
    files, limit = touched(asked.revision), MAX_FILES[asked.recipe]
    strays = [file for file in files if not any(fnmatch.fnmatch(file, p) for p in ALLOWED[asked.recipe])]
    for file in files:
        print(f"{'NOT IN THE RECIPE ' if file in strays else ''}{file}")
    print(f"{len(files)} files" + (f", at most {limit}" if limit else ""))
    return 1 if strays or (limit is not None and len(files) > limit) else 0


if __name__ == "__main__":
    raise SystemExit(main())
