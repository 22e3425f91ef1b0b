"""Short runs of the attacks, with a fixed seed and with a new one."""

from __future__ import annotations

import secrets
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forks import Run
from tests.sanitizers import COMPILER

IMPORTS = ("torch.distributed.checkpoint.state_dict",)
lives = pytest.param("lives", 8, marks=pytest.mark.skipif(find_spec("torch") is None, reason="no PyTorch"))


def run(forks: Run, attack: str, cases: int, seed: int, *options: str) -> None:
    words = ["-m", "tests.stress", attack, f"--cases={cases}", f"--seed={seed}", *options]
    status, said = forks(*words)
    assert status == 0, f"{words}: {said[-12000:]}"


@pytest.mark.parametrize(("attack", "cases"), [("calls", 100), ("messages", 15), lives])
def test_attack_with_a_fixed_seed(forks: Run, attack: str, cases: int) -> None:
    run(forks, attack, cases, 23, "--jobs=0")  # 8 lives have all front ends


@pytest.mark.exhaustive
@pytest.mark.parametrize(("attack", "cases"), [("calls", 3000), ("messages", 100), lives])
def test_attack_with_a_new_seed(forks: Run, attack: str, cases: int) -> None:
    run(forks, attack, 4 * cases if attack == "lives" else cases, secrets.randbits(31), "--jobs=1")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")
@pytest.mark.slow
@pytest.mark.exhaustive
def test_calls_and_messages_under_sanitizers(forks: Run, tmp_path: Path) -> None:
    for attack, cases in (("calls", 50), ("messages", 10)):
        run(forks, attack, cases, 1, f"--sanitized={tmp_path}/build", "--jobs=1")
