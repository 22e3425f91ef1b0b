"""One rank is interrupted at every place of a scene, and recovers as docs/reference/errors.md says.

`tests/stress/interrupts.py` plays the same scenes on two ranks.
"""

from __future__ import annotations

import contextlib
from contextlib import nullcontext
from typing import Any

import pytest

MPI = pytest.importorskip("mpi4py.MPI")

from tests import interrupts  # noqa: E402
from tests.interrupts import Points, interrupted  # noqa: E402
from tests.stress import scenes  # noqa: E402
from tests.stress.scenes import SCENES, Scene  # noqa: E402
from tests.thinning import exhaustive  # noqa: E402

ALONE: dict[str, Scene] = {n: scene for n, scene in SCENES.items() if not n.startswith(("torch-hook", "nodes"))}
ALONE |= {
    "reducer-clip-momentum": scenes._reducer_step(1, clip=5.0, momentum=0.5),
    "reducer-clip-chunks": scenes._reducer_step(1, scope="chunk", chunk=10, decay=0.5, clip=5.0),
}
LONG = ("load-DistributedOptimizer", "load-DiLoCo", "torch-optimizer-first")


class Alone:
    """The only rank of a scene."""

    rank, node = 0, "auto"

    def new(self) -> Any:
        return MPI.COMM_SELF.Dup()

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.filterwarnings("ignore:Adam divides gradients")
@pytest.mark.parametrize("name", [exhaustive(name) if name in LONG else name for name in ALONE])
def test_after_an_interrupt_the_outcome_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "torch" if name.startswith("torch") or name.endswith(("State", "DiLoCo", "Optimizer")) else "sys"
    )
    pytest.importorskip("optax" if name.startswith("load-jax") else "sys")
    # The library uses context managers of `contextlib`, so interrupt these, too.
    monkeypatch.setattr(interrupts.Points, "roots", (*Points.roots, contextlib.__file__))
    monkeypatch.setattr("tests.stress.scenes.time.sleep", lambda _: None)
    right, at, came = ALONE[name](Alone(), nullcontext), 0, 1  # type: ignore[arg-type]
    while came:
        points = Points(at)
        outcome = ALONE[name](Alone(), lambda points=points: interrupted(points=points))  # type: ignore[arg-type,misc]
        assert outcome == right, points.where
        at, came = at + 1, points.interrupts
    assert at >= 2
