"""The hook of DistributedDataParallel, between processes of this machine: what they do is in `training_hook.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch.distributed")

from tests.thinning import whole
from tests.torch import training_jobs


@pytest.mark.slow
@pytest.mark.parametrize("P", [whole(1), 3])
def test_cases(P: int, tmp_path: Path) -> None:
    training_jobs.run(P, tmp_path, "training_hook", "training_amp")


def test_futures_know_the_devices_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sparsecomm.torch import hook

    devices = []
    monkeypatch.setattr(torch.futures, "Future", lambda *, devices=devices, to=devices: to.append(devices))
    for name in ("cpu", "cuda:1"):
        hook._future_of(SimpleNamespace(device=torch.device(name)))  # type: ignore[arg-type]
    assert devices == [None, [torch.device("cuda:1")]]


def test_without_torch_it_is_said_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import sparsecomm.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "sparsecomm.torch needs PyTorch" in done.stderr
    assert re.search(r"pip install .*\[torch\]'", done.stderr)
