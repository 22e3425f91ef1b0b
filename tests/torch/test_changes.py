"""`SparseAdamW` follows all changes to `optimizer.state`, groups, settings and weights, as PyTorch's AdamW does."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.examples.conftest import Run, forks  # noqa: F401
from tests.torch.changes import WAYS

IMPORTS = "torch.distributed", "sparsecomm.torch"
PROGRAM = "import sys; from tests.torch.changes import main; main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def outcomes(forks: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    """What went wrong, by way. One pair of ranks tries all ways, and another one the rest if a way ends the first."""
    found: dict[str, Any] = {}
    while left := [name for name in WAYS if name not in found]:
        status, said = forks("-c", PROGRAM, tmp_path_factory.mktemp("changes"), *left, ranks=2)
        lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"way"')]
        found |= {line["way"]: line["wrong"] for line in lines}
        if status and len(lines) < len(left):
            found[left[len(lines)]] = {f"the ranks ended with status {status}": said[-3000:]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_change_takes_effect_in_the_next_step(outcomes: dict[str, Any], name: str) -> None:
    """As with dense AdamW at density 1.0. At 0.09 the weights are the same on all ranks."""
    wrong = {training: what for training, what in outcomes[name].items() if what}
    assert not wrong, json.dumps(wrong, indent=1)
