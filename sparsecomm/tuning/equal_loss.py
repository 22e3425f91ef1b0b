"""How many more local steps a way to train together takes to the same loss: what is known from trainings.

They are those of docs/reports/local-steps.md: P = 8, 600 local steps of AdamW, 64 of each chunk of 4,096 elements in
2 bits, the mean of contributors, a decay of 0.8; nats after them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["TRAINED", "nats", "relative_steps"]

# By algorithm: H, and nats. "dense" is DiLoCo, with Nesterov's momentum as its outer optimizer where H > 1.
TRAINED: dict[str, Sequence[tuple[int, float]]] = {
    "dense": ((1, 1.486), (10, 1.550), (30, 1.577), (100, 1.661)),
    "allgather": ((1, 1.394), (10, 1.454), (15, 1.473), (30, 1.552), (100, 1.834)),
    "split:2": ((1, 1.457), (5, 1.509), (10, 1.534), (15, 1.571), (30, 1.649), (100, 1.999)),
}
# Dense sums in every step, by the steps of the training: from the same file.
_DENSE = ((300, 1.714), (600, 1.486), (1200, 1.364))
# Nats that a delay adds, by its part of H: those of bench/results/local-steps-delay.txt, for H = 8 and H = 30.
_LATE = ((0.0, 0.0), (0.26, 0.02), (0.5, 0.064), (0.83, 0.362))


def nats(algorithm: str, sync_every: int, delay: int = 0) -> float:
    """Return the loss of such a training, between those that were made; ``delay``: `fragment_sync_delay`."""
    points = [(math.log(H), loss) for H, loss in TRAINED[algorithm]]
    return _line(points, math.log(sync_every)) + _line(_LATE, delay / sync_every)


def relative_steps(loss: float) -> float:
    """Return how many local steps it takes to the loss of dense sums in every step, over theirs; 1 at least.

    Args:
        loss: in nats, after as many steps as theirs.
    """
    points = [(-its, math.log(steps)) for steps, its in _DENSE]
    return max(1.0, _DENSE[1][0] / math.exp(_line(points, -loss)))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x on the line through points, which goes on straight beyond them."""
    i = next((i for i, (at, _) in enumerate(points[1:-1], 1) if x < at), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)
