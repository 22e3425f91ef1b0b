"""Measured losses of training runs, and the number of steps that reach the same loss.

`TRAINED` is from docs/reports/local-steps.md: 8 ranks, 600 local steps of AdamW. A round sends 64 entries of each chunk
of 4,096 elements in 2 bits, divides by the number of contributors, and multiplies the residual by 0.8. The runs of
`STEPS_TRAINED` exchange in every step: docs/reports/convergence.md and docs/guides/choosing.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PARTICIPANTS = 8  # number of ranks in all these runs
# By algorithm: H, and the loss in nats. "dense" is DiLoCo; its outer optimizer is Nesterov's momentum for H > 1.
TRAINED: dict[str, Sequence[tuple[int, float]]] = {
    "dense": ((1, 1.486), (10, 1.550), (30, 1.577), (100, 1.661)),
    "allgather": ((1, 1.394), (10, 1.454), (15, 1.473), (30, 1.552), (100, 1.834)),
    "split:2": ((1, 1.457), (5, 1.509), (10, 1.534), (15, 1.571), (30, 1.649), (100, 1.999)),
}
# Nats above dense sums of `double` on 8 ranks, by optimizer (AdamW or SGD), wire format and density.
STEPS_TRAINED = {
    (True, "packed_int2", 0.09): -0.004,
    (True, "packed_sign", 0.033): 0.033,
    (False, "packed_int2", 0.1): 0.020,  # after 100 dense steps
    (False, "packed_int2", 0.018): 0.009,  # with momentum correction and a warm-up
}
# Loss with dense sums in every step, by the number of steps.
_DENSE = ((300, 1.714), (600, 1.486), (1200, 1.364))
# Nats that a delay adds, by delay / H (bench/results/local-steps-delay.txt, H = 8 and H = 30).
_LATE = ((0.0, 0.0), (0.26, 0.02), (0.5, 0.064), (0.83, 0.362))


def nats(algorithm: str, sync_every: int, delay: int = 0) -> float:
    """Return the interpolated loss of a training; ``delay`` is `fragment_sync_delay`."""
    points = [(math.log(H), loss) for H, loss in TRAINED[algorithm]]
    return _line(points, math.log(sync_every)) + _line(_LATE, delay / sync_every)


def relative_steps(loss: float) -> float:
    """Return the steps needed for the loss of dense sums in every step, as a multiple of their steps; at least 1.

    ``loss``: in nats, after the same number of steps as with dense sums.
    """
    points = [(-dense_loss, math.log(steps)) for steps, dense_loss in _DENSE]
    return max(1.0, _DENSE[1][0] / math.exp(_line(points, -loss)))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points, and extrapolate beyond them."""
    i = next((i for i, (at, _) in enumerate(points[1:-1], 1) if x < at), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)
