"""Training on GPUs, which ranks share if there are fewer, compared with dense training in the same program."""

from __future__ import annotations

import pytest

from tests.processes import mpirun, torchrun

pytestmark = pytest.mark.gpu


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    status, said = torchrun(2, "-m", "tests.gpu.training")
    print(said)
    assert status == 0, said


@pytest.mark.parametrize(("P", "backend"), [(4, "gloo"), (1, "nccl")])
def test_nodes(P: int, backend: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    status, said = torchrun(P, "-m", "tests.gpu.nodes", backend)
    print(said)
    assert status == 0, said


def test_jax() -> None:
    pytest.importorskip("optax")
    options = ("-x", "XLA_PYTHON_CLIENT_PREALLOCATE=false")  # ranks share a GPU
    status, said = mpirun(2, "-m", "tests.gpu.jax_training", options=options)
    print(said)
    assert status == 0, said
    if "JAX finds no GPU" in said:
        pytest.skip("JAX finds no GPU")
