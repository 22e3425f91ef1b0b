"""The quick part of `python -m tests.conformance`: no test of another project fails with this library."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.conformance.outcomes import Outcome, table
from tests.forks import Run

MISSING = [name for name in ("torch", "expecttest", "accelerate", "jax", "optax") if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: `pip install -e . --group test`"),
]


@pytest.fixture(scope="module")
def quick(forks: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    file = tmp_path_factory.mktemp("conformance") / "outcomes"
    status, output = forks("-m", "tests.conformance", "--quick", "--json", file)
    assert file.exists(), f"exit status {status}\n{output}"
    return [Outcome(**outcome) for outcome in json.loads(file.read_text())]


@pytest.mark.parametrize("package", ["AdamW in `optim_db`", "DDP tests", "Accelerate", "optax"])
def test_tests_of_other_projects_pass(package: str, quick: list[Outcome]) -> None:
    suite_outcomes = [outcome for outcome in quick if package in outcome.suite]
    assert not [outcome for outcome in suite_outcomes if outcome.result == "failed"], table(suite_outcomes)
    assert any(outcome.result == "passed" for outcome in suite_outcomes), table(suite_outcomes)
