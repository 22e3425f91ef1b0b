"""The files that run in a call and in a step are those that `docs/internals/architecture.md` draws."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT, mpirun, needs_mpirun
from tests.thinning import exhaustive

ARCHITECTURE = ROOT / "docs" / "internals" / "architecture.md"
THROUGH = {
    "call": ["calls/collectives.py", "transport/mpi.py", "wire/messages.py", "backends/_cpu (compiled)"],
    "adamw": ["torch/adamw.py", "optimizers/adamw.py", "reducer/reducer.py", "transport/mpi.py"],
    "step": [
        "torch/exchange.py",
        "reducer/reducer.py",
        "transport/process_group/transport.py",
        "backends/_cpu (compiled)",
    ],
}


@needs_mpirun
@pytest.mark.parametrize("what", ["call", exhaustive("adamw"), exhaustive("step")])
def test_listed_files_exist_and_are_drawn(what: str) -> None:
    if what != "call":
        pytest.importorskip("torch")
    status, said = mpirun(2, "-m", "tests.docs.files_run", what)
    assert status == 0, said
    listed = dict(re.findall(rf"^(first|second) {what}: \d+ files\n((?:  .*\n)+)", said, re.MULTILINE))
    for files in (listed["first"].split("\n  "), listed["second"].split("\n  ")):
        names = [file.strip().removeprefix("sparsecomm/") for file in files]
        assert len(names) == len(set(names)), said
        assert set(THROUGH[what]) <= set(names), said
        for name in names:  # a module compiled from Python has been listed by its source
            paths = list((ROOT / "sparsecomm").glob(name if name.endswith(".py") else f"{name.split()[0]}.*.so"))
            assert paths, name
            assert name.endswith(".py") or not (ROOT / "sparsecomm" / f"{name.split()[0]}.py").exists(), name
    assert len(listed["second"]) <= len(listed["first"])
    if what in DRAWN:
        compiled = {re.sub(r"_(openmpi|mpich|mpiabi)$", "", name.split()[0]) for name in names if "compiled" in name}
        assert drawn(DRAWN[what]) == compiled | {name.removesuffix(".py") for name in names if name.endswith(".py")}


DRAWN = {"call": "A call", "step": "A step"}  # headings of the page of the architecture


def drawn(heading: str) -> set[str]:
    """Return the files in the first drawing below a heading. `tensors/interop, _dlpack` means two files of a folder."""
    section = ARCHITECTURE.read_text().split(f"## {heading}\n")[1]
    files: set[str] = set()
    for line in section.split("```")[1].splitlines():
        words = re.split(r"\s{2,}", line.lstrip(" |`-"))[0]
        folder, slash, names = words.rpartition("/")
        files |= {f"{folder}{slash}{name.strip()}" for name in names.split(",") if name}
    return files
