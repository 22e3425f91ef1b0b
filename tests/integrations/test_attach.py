"""`attach`: residuals and refused arguments. The frameworks run in `test_frameworks.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import sparsecomm as sc  # noqa: E402
from sparsecomm.integrations.attach import attach  # noqa: E402
from sparsecomm.torch import DistributedOptimizer, SparseAdamW  # noqa: E402


@pytest.fixture
def ddp():  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(20, 10))
    dist.destroy_process_group()


def test_residuals_are_loaded_by_id_only(
    ddp: DistributedDataParallel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attached = attach(ddp, [torch.optim.SGD(ddp.module.parameters(), lr=0.1)], 0.1, {"dense_below": 0})
    ddp(torch.arange(20.0).reshape(1, 20)).sum().backward()
    residual = attached.reducers[0].residual("weight").copy()
    assert residual.any()
    names = [f"{attached.run}-{number}" for number in range(3)]
    for name in names:
        attached.save(tmp_path, name)
    ddp(torch.ones(1, 20)).sum().backward()
    attached.load(tmp_path, names[2], "a.ckpt")
    assert not caplog.messages
    assert attached.step == 1
    assert (attached.reducers[0].residual("weight") == residual).all()
    assert not names[0].startswith(attached.run)  # a run that repeats steps gets other names
    attached.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == names[2:]
    unknown = "was saved without residuals"
    for wrong, words in ((names[0], "copy that folder"), (None, unknown), (f"../{tmp_path.name}/{names[2]}", unknown)):
        caplog.clear()
        attached.load(tmp_path, wrong, "b.ckpt")
        assert words in caplog.text
        assert not attached.reducers[0].residual("weight").any()


def test_one_kind_of_optimizers(ddp: DistributedDataParallel) -> None:
    both = [SparseAdamW([("weight", ddp.module.weight)]), torch.optim.SGD([ddp.module.bias], lr=0.1)]
    with pytest.raises(sc.InvalidInputError, match="SparseAdamW exchanges gradients itself and SGD does not"):
        attach(ddp, both, 0.01, {})
    both[0].remove()


def test_means_that_ddp_would_overwrite(ddp: DistributedDataParallel) -> None:
    sgd = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, ddp.module.named_parameters())
    with pytest.raises(sc.InvalidInputError, match="pass a plain optimizer, for which a hook exchanges"):
        attach(ddp, [optimizer], 0.01, {})
    optimizer.remove()


def test_an_error_says_how_to_start_several_processes() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(sc.InvalidInputError, match="because there is only one process; start it with torchrun"):
        attach(model, [torch.optim.SGD(model.parameters())], 0.01, {})


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_framework_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"sparsecomm.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"sparsecomm.integrations.{name} needs .* install"):
        importlib.import_module(f"sparsecomm.integrations.{name}")
