"""A short form of `lost_rank`, which kills ranks at random times."""

from __future__ import annotations

import pytest

from tests.processes import needs_mpirun, needs_survivors
from tests.stress import lost_rank
from tests.thinning import whole


@pytest.mark.mpi
@needs_mpirun
@needs_survivors
# In calls, at the first call, and in steps. In the first call MPI duplicates the communicator, and Open MPI 5.0.11 now
# and then ends with a segmentation fault of its own (docs/how-to/lost-rank.md): not where every failure counts.
@pytest.mark.parametrize("seed", [1, whole(2), 5])
def test_survivors_go_on_alike_with_nothing_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_rank, "SECONDS", 30.0)  # the machine may do much else
    made = lost_rank.run(seed)
    assert not made.wrong, "\n".join(made.wrong)
    assert lost_rank.report([made]).startswith("1 kills")
