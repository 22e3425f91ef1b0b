"""The files that a call and a step run through, as `bench.trace_call` finds them."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT, mpirun, needs_mpirun
from tests.thinning import exhaustive

THROUGH = {
    "call": ["calls/sparse.py", "transport/mpi.py", "wire/messages.py", "backends/_cpu (compiled)"],
    "adamw": ["torch/adamw.py", "optimizers/adamw.py", "reducer/reducer.py", "transport/mpi.py"],
    "step": ["torch/hook.py", "reducer/reducer.py", "transport/process_group/transport.py", "backends/_cpu (compiled)"],
}


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.parametrize("what", ["call", exhaustive("adamw"), exhaustive("step")])
def test_what_runs_is_listed_once_and_exists(what: str) -> None:
    if what != "call":
        pytest.importorskip("torch")
    status, said = mpirun(2, "-m", "bench.trace_call", what)
    assert status == 0, said
    listed = dict(re.findall(rf"^(first|second) {what}: \d+ files\n((?:  .*\n)+)", said, re.MULTILINE))
    for files in (listed["first"].split("\n  "), listed["second"].split("\n  ")):
        names = [file.strip().removeprefix("sparsecomm/") for file in files]
        assert len(names) == len(set(names)), said
        assert set(THROUGH[what]) <= set(names), said
        for name in names:  # of what is compiled from Python, the source has run
            found = list((ROOT / "sparsecomm").glob(name if name.endswith(".py") else f"{name.split()[0]}.*.so"))
            assert found, name
            assert name.endswith(".py") or not (ROOT / "sparsecomm" / f"{name.split()[0]}.py").exists(), name
    assert len(listed["second"]) <= len(listed["first"])
