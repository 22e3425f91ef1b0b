"""The hook, the optimizer, shards and broadcasts between local processes.

The processes run the cases in ``training_*.py``.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

from sparsecomm.torch import exchange  # noqa: E402
from tests.forks import Run  # noqa: E402
from tests.processes import ENVIRONMENT, LIMIT  # noqa: E402
from tests.thinning import exhaustive  # noqa: E402

IMPORTS = (
    "pytest", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._inductor.cudagraph_trees",
)  # fmt: skip
PROGRAM = "import sys; from tests.torch.training_ranks import main; main(*sys.argv[1:])"
OF_ANY_SIZE = ("ways", "hook", "optimizer", "adamw", "broadcast", "layers", "saved", "late")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# FSDP2 needs means, but before 2.9 gloo's reduce_scatter sums, and 2.6 fails earlier.
needs_fsdp = pytest.mark.skipif(VERSION < (2, 9), reason="FSDP2 on CPUs needs PyTorch 2.9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("P", "names"),
    [
        (3, OF_ANY_SIZE),
        (2, ("gradients", "compiled")),
        pytest.param(4, ("shards",), marks=needs_fsdp),
        (4, ("nodes",)),
        exhaustive(1, (*OF_ANY_SIZE, "compiled")),
    ],
)
def test_cases(forks: Run, P: int, names: tuple[str, ...], tmp_path: Path) -> None:
    status, said = forks("-c", PROGRAM, tmp_path, *(f"training_{name}" for name in names), ranks=P)
    print(said)
    assert status == 0, said


@pytest.mark.slow
def test_survivors_go_on_with_a_new_process_group(tmp_path: Path, forks: Run) -> None:
    status, said = forks("-c", PROGRAM, tmp_path, "training_lost", ranks=3)
    assert status == signal.SIGKILL, said
    assert said.count("passed survivors_go_on") == 2, said


@pytest.mark.slow
def test_nobody_is_silently_alone_in_a_job_of_torchrun(forks: Run) -> None:
    program, frameworks = Path(__file__).with_name("job_of_torchrun.py"), ["jax"] if find_spec("jax") else []
    status, said = forks(program, *frameworks, ranks=2, JAX_PLATFORMS="cpu")
    assert status == 0, said
    assert said.count("is done") == 2


def test_slow_modules_are_not_imported() -> None:
    program = (
        "import sys, numpy as np, sparsecomm as sc\n"
        "sc.sparse_allreduce(np.ones(4, np.float32), 4)\n"
        "assert 'torch' not in sys.modules\n"
        "import sparsecomm.torch\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True, timeout=LIMIT)


def test_futures_know_the_devices_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(torch.futures, "Future", lambda *, devices=devices, to=devices: to.append(devices))
    for name in ("cpu", "cuda:1"):
        exchange.new_future(SimpleNamespace(device=torch.device(name)))  # type: ignore[arg-type]
    assert devices == [None, [torch.device("cuda:1")]]


def test_without_torch_it_is_said_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import sparsecomm.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "sparsecomm.torch needs PyTorch" in done.stderr
    assert re.search(r"pip install .*\[torch\]'", done.stderr)
