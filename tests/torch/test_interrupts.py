"""Interrupted exchanges of gradients continue, or raise an error that says why they cannot."""

from __future__ import annotations

import contextlib
import gc
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import torch
from mpi4py import MPI

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseAdamW
from sparsecomm.torch.checkpoints import TorchFormat
from tests import interrupts
from tests.interrupts import InterruptError, interrupted

Result = list[Any]
RAISED = InterruptError, sc.InvalidInputError  # the latter if the export of a tensor is interrupted


class Points(interrupts.Points):
    """Interrupt PyTorch's functions, too, which run between the library's."""

    roots = (interrupts.LIBRARY, str(Path(torch.__file__).parent))


class Scaler:
    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def parameters() -> dict[str, Any]:
    return {"a": torch.nn.Parameter(torch.zeros(4, 5)), "b": torch.nn.Parameter(torch.zeros(7))}


def gradients(step: int) -> dict[str, Any]:
    """Return gradients of integers; that of "a" is not contiguous."""
    random = torch.Generator().manual_seed(step)
    a, b = (torch.randint(-9, 10, shape, generator=random).float() for shape in ((5, 4), (7,)))
    return {"a": a.t(), "b": b}


def wrapped(named: dict[str, Any], **options: Any) -> Any:
    settings = {"comm": MPI.COMM_SELF, "scope": "tensor", "dense_below": 0, "check_weights_every": None} | options
    return DistributedOptimizer(torch.optim.SGD(named.values(), lr=1.0), named.items(), sc.Warmup(0.3, 0), **settings)


def exchanged(synchronize: Callable[[Any, int], None], scaled: bool, *at: int) -> tuple[int, Result]:
    """Make two steps, the second interrupted. Return the number of interrupts, and means, residuals and parameters."""
    named = parameters()
    scaler = Scaler() if scaled else None
    optimizer = wrapped(named, scaler=scaler)
    for step in range(2):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        if scaler is not None:
            scaler.scale *= 4
        with interrupted(points=Points(*(at if step else []))) as points:
            synchronize(optimizer, step)
        means = [p.grad.clone() for p in named.values()]
        optimizer.step()
        assert optimizer.reducer.step == step + 1, "exchanged twice"
    residuals = optimizer.state_dict()["sparsecomm"]["residuals"].values()
    return points.interrupts, [*means, *residuals, *(p.detach() for p in named.values())]


def again(optimizer: Any, step: int) -> None:
    """Synchronize, again if the exchange has not ended."""
    with contextlib.suppress(*RAISED):
        optimizer.synchronize()
    if optimizer.reducer.step == step:
        optimizer.synchronize()


def and_step(optimizer: Any, step: int) -> None:
    """Synchronize; after an interrupt, `step` completes the exchange."""
    with contextlib.suppress(*RAISED):
        optimizer.synchronize()


@pytest.fixture(autouse=True)
def _gradients_are_recorded() -> Iterator[None]:
    """Enable gradients, whatever mode other tests have left in this thread."""
    with torch.enable_grad():
        yield


@pytest.mark.parametrize("synchronize", [again, and_step])
@pytest.mark.parametrize("scaled", [False, True])
def test_synchronize_interrupted_anywhere_goes_on(synchronize: Callable[[Any, int], None], scaled: bool) -> None:
    right, at, interrupts = exchanged(synchronize, scaled)[1], 0, 1
    while interrupts:
        interrupts, outputs = exchanged(synchronize, scaled, at)
        same = [torch.equal(x, y) for x, y in zip(outputs, right, strict=True)]
        assert all(same) or (synchronize is and_step and all(same[2:])), at  # means are set later
        at += 1
    assert at >= 2


def test_an_interrupt_when_passes_are_counted_does_not_lose_one() -> None:
    """The passes are exchanged, or an error says what to do."""

    def run(*at: int) -> tuple[int, int]:
        named = parameters()
        optimizer = wrapped(named, backward_passes_per_step=2)
        loss = lambda: named["a"].sum() + named["b"].sum()  # noqa: E731
        with interrupted(points=Points(*at)) as points, contextlib.suppress(*RAISED):
            loss().backward()
            loss().backward()
        for _ in range(2):
            if optimizer.reducer.step == 0:
                if optimizer._exchange._pass_id is None:
                    loss().backward()
                else:
                    with pytest.raises(sc.InvalidInputError, match=r"call synchronize\(\)"):
                        loss().backward()
                    optimizer.synchronize()
        return points.interrupts, optimizer.reducer.step

    at, interrupts = 0, 1
    while interrupts:
        interrupts, steps = run(at)
        assert steps == 1
        at += 1
    assert at >= 2


# -- SparseAdamW ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_of_adamw_interrupted_anywhere_goes_on(which: int) -> None:
    """Calling it again completes the step: weights, moments and residuals equal those without an interrupt."""

    def run(*at: int) -> tuple[int, Result]:
        named, came = parameters(), 0
        optimizer = SparseAdamW(named.items(), 0.1, density=0.3, comm=MPI.COMM_SELF, check_weights_every=None)
        adamw = optimizer._exchange.adamw
        for number in range(3):
            for name, gradient in gradients(number).items():
                named[name].grad = gradient
            here = interrupts.Points(*(at if number == which else []))
            with interrupted(points=here) as seen, contextlib.suppress(*RAISED):
                optimizer.step()
            came = seen.interrupts if number == which else came
            if max(adamw.steps.values()) == number:
                optimizer.step()
            assert max(adamw.steps.values()) == number + 1
        residuals = [optimizer.reducer.residual(name) for name in named]
        arrays = [
            *(p.detach().numpy() for p in named.values()),
            *residuals,
            *(a for m in adamw.moments.values() for a in m[:3]),
        ]
        return came, [array.copy() for array in arrays]

    right, at, came = run()[1], 0, 1
    while came:
        came, arrays = run(at)
        for ours, theirs in zip(arrays, right, strict=True):
            assert (ours == theirs).all(), at
        at += 1
    assert at >= 2


def test_an_interrupted_save_ends_with_the_exception_of_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's writer finishes its file when it is destroyed, and would abort if that Python file were closed."""
    opener, written = torch.serialization._opener, []
    monkeypatch.setattr(opener, "__enter__", lambda self: interrupt_second(self.file_like))

    def interrupt_second(writer: Any) -> Any:
        if isinstance(writer, torch._C.PyTorchFileWriter):
            written.append(1)
            if len(written) == 2:  # the first file tests whether all types can be loaded
                signal.raise_signal(interrupts.SIGNAL)
        return writer

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            signal.raise_signal(interrupts.SIGNAL)
            return super().write(data)

    with interrupted(), File() as file, pytest.raises(InterruptError) as caught:
        TorchFormat().dump(file, {"x": torch.zeros(9)})
    assert len(written) == 2
    del caught
    gc.collect()
