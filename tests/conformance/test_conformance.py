"""The quick part of `python -m tests.conformance`: no test of other people fails with this library switched in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.outcomes import Outcome, table
from tests.processes import run_python

for needed in ("torch", "expecttest", "accelerate", "optax"):
    pytest.importorskip(needed)

# Those of a group run in one process, which imports PyTorch once.
GROUPS = (("adamw",), ("ddp", "accelerate_scripts", "optax_tests"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("conformance")

    def run(suites: tuple[str, ...]) -> list[Outcome]:
        file = folder / suites[0]
        status, output = run_python("-m", "tests.conformance", *suites, "--quick", "--json", str(file))
        assert file.exists(), f"exit status {status}\n{output}"
        return [Outcome(**outcome) for outcome in json.loads(Path(file).read_text())]

    with ThreadPoolExecutor() as threads:
        return [outcome for group in threads.map(run, GROUPS) for outcome in group]


@pytest.mark.parametrize("package", ["AdamW in `optim_db`", "DDP tests", "Accelerate", "optax"])
def test_with_ours_the_tests_of(package: str, quick: list[Outcome]) -> None:
    its = [outcome for outcome in quick if package in outcome.suite]
    assert not [outcome for outcome in its if outcome.result == "failed"], table(its)
    assert any(outcome.result == "passed" for outcome in its), table(its)
