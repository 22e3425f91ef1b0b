"""`broadcast_parameters`, between processes of this machine: what they do is in `training_broadcast.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from sparsecomm.torch import broadcast_parameters  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.thinning import exhaustive  # noqa: E402
from tests.torch import training_jobs  # noqa: E402


@pytest.mark.parametrize("P", [exhaustive(1), 3])
def test_cases(P: int, tmp_path: Path) -> None:
    training_jobs.run(P, tmp_path, "training_broadcast")


def test_simulated_ranks() -> None:
    def program(ranks: simulated.SimulatedTransport) -> list[float]:
        tensor = torch.tensor([1.5, -0.0, torch.inf, -3.0]) * (1 + ranks.rank)
        broadcast_parameters({"a": tensor}, 2, comm=ranks)
        return tensor.view(torch.int32).tolist()

    expected = (torch.tensor([1.5, -0.0, torch.inf, -3.0]) * 3).view(torch.int32).tolist()
    assert [result.value for result in simulated.run(3, program)] == [expected] * 3
