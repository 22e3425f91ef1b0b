"""`check_weights` on simulated ranks."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.emulator.tensor import CudaTensor
from tests.ranks import run
from tests.thinning import exhaustive


def outcomes(P: int, tensors: Any) -> list[BaseException | None]:
    """Return the error of `check_weights` on each rank with ``tensors(rank)``, and make another call."""

    def program(transport: simulated.SimulatedTransport) -> BaseException | None:
        outcome = None
        try:
            sc.check_weights(tensors(transport.rank), comm=transport)
        except sc.SparseCommError as error:
            outcome = error
        sc.check_weights({"a": np.ones(3)}, comm=transport)
        return outcome

    return run(P, program)


def of_every_kind() -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "nan": np.array([np.nan, -0.0, 1]),
        "int": np.arange(5),
        "bool": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "scalar": np.array(3, np.float16),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "none": np.empty((0, 3)),
        "readonly": np.frombuffer(b"abcd", np.uint8),
        "no tensor": 7,
    }
    torch = pytest.importorskip("torch")
    tensors |= {
        "bfloat16": torch.ones(3).bfloat16(),
        "parameter": torch.nn.Parameter(torch.ones(2, 3).t()),
        "flag": torch.tensor([True]),
    }
    eighth = torch.ones(3).to(torch.float8_e4m3fn)
    with suppress(BufferError):  # PyTorch 2.6 does not export this type
        eighth.__dlpack__()
        tensors["eighth"] = eighth
    return tensors


@pytest.mark.parametrize("P", [1, exhaustive(2), 5])
def test_equal_bits_are_equal_weights(P: int) -> None:
    pytest.importorskip("greenlet")
    assert outcomes(P, lambda rank: of_every_kind()) == [None] * P
    assert outcomes(P, lambda rank: {}) == [None] * P


@pytest.mark.parametrize("P", [2, 5])
def test_all_ranks_name_the_first_tensor_and_rank_that_differ(P: int) -> None:
    *names, last = [name for name, t in of_every_kind().items() if name not in ("none", "no tensor")]
    for name in names:

        def tensors(rank: int, name: str = name) -> dict[str, Any]:
            weights = of_every_kind()
            if rank == P - 1:
                weights[name] = _with_another_bit(weights[name])
            if rank == 1:
                weights[last] = _with_another_bit(weights[last])
            return weights

        for error in outcomes(P, tensors):
            assert isinstance(error, sc.WeightMismatchError)
            assert str(error).startswith(f"{name}, "), error
            assert f"of rank {P - 1} differ from rank 0's. Of {len(names) + 2} tensors, this is the first" in str(error)
            assert f"Of {P} ranks, rank{'s 1,' * (P > 2)} {P - 1} differ{'s' * (P == 2)} from rank 0." in str(error)


def _with_another_bit(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        changed = tensor.copy()
        changed.reshape(-1)[-1:].view(np.uint8)[-1] ^= 1
        return changed
    torch = pytest.importorskip("torch")
    changed = tensor.detach().contiguous().clone()
    changed.view(-1)[-1:].view(torch.uint8)[-1] ^= 1
    return changed


ONES = {"a": np.ones(3)}
OTHERS: list[Any] = [{"b": np.ones(3)}, {"a": np.ones(4)}, {"a": np.ones(3, int)}, {"a": np.ones((3, 1))}, {}]


@pytest.mark.parametrize("theirs", [*OTHERS, ONES | {"b": np.ones(1)}])
def test_different_tensors_are_refused_on_all_ranks(theirs: dict[str, Any]) -> None:
    for error in outcomes(3, lambda rank: theirs if rank == 1 else ONES):
        assert type(error) is sc.CollectiveMismatchError
        assert re.search(r"[ab] is [a-z].* on rank \d and [a-z].* on rank \d: use the same .* tensors", str(error))


@pytest.mark.covering(2)
@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("same", ["gradients", "all but one", "zeros", "absent", "nothing"])
@pytest.mark.parametrize("buffers", ["equal", "different", "missing"])
def test_a_first_step_warns_of_equal_gradients_and_different_buffers(P: int, same: str, buffers: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        rank = transport.rank
        reducer = sc.Reducer({"a": np.zeros(40, np.float32), "b": np.zeros((), np.float32)}, 0.1, comm=transport)
        statistics = {"mean": np.full(3, rank if buffers == "different" else 7.0)}
        if buffers == "missing" and rank == 0:
            statistics = {}
        for step in range(2):
            if step == 0:
                reducer.buffers = lambda statistics=statistics: statistics
                reducer.check_weights(0, lambda: {"w": np.ones(2)})
            a, b = (np.full(shape, step + 2 + (same == "nothing") * rank, np.float32) for shape in (40, ()))
            if same == "all but one":
                a[17] += rank
            if same == "zeros" or (same == "absent" and rank == P - 1):
                a, b = np.zeros_like(a), np.zeros_like(b)
            gradients = {"b": b, "a": a} if rank else {"a": a, "b": b}
            reducer.reduce({} if same == "absent" and rank == P - 1 else gradients)

    wrong = ["gradients of the first step are the same on all"] * (same == "gradients")
    wrong += ["buffers differ after the first step ('mean')"] * (buffers == "different")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(P, program)
    said = [str(warning.message) for warning in caught]
    assert all(warning.filename == __file__ for warning in caught)
    assert len(said) == (P * len(wrong) if P > 1 else 0)
    assert all(sum(text in message for message in said) == P for text in wrong if P > 1)


def test_wrong_arguments() -> None:
    for tensors, match in (
        ([np.ones(3)], "rank 0: tensors: got list with ndarray in it; expected names"),
        ({"a": CudaTensor(np.ones(3, np.float32))}, "rank 0: a: got a tensor that is on a device"),
    ):
        first, _ = outcomes(2, lambda rank, tensors=tensors: tensors)
        assert isinstance(first, sc.InvalidInputError)
        assert match in str(first)


def test_bytes_of_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    changed = {"a": jnp.ones(3, jnp.bfloat16).at[2].set(2)}
    errors = outcomes(3, lambda rank: changed if rank == 2 else {"a": jnp.ones(3, jnp.bfloat16)})
    assert all("a, bfloat16 (3,): the weights of rank 2" in str(error) for error in errors)
