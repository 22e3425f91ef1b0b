"""Momentum correction and clipping, which change a gradient before it is added to the residual; and residual decay.

Lin et al., Deep Gradient Compression (ICLR 2018), Sections 3.1 to 3.3. A residual of plain gradients would make the
optimizer's momentum count the steps for which an entry has waited wrongly. So momentum is applied on each rank,
before the residual: the velocity is what accumulates, and the optimizer has no momentum of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sparsecomm.checks import flag, number, shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.sparse import Array

__all__ = ["MEDIAN", "Clip", "MomentumCorrection"]

Clip: TypeAlias = float | Literal["median"] | None
MEDIAN = "median"


@dataclass(frozen=True)
class MomentumCorrection:
    """The settings of momentum correction, clipping and decay, and their arithmetic.

    Attributes:
        momentum: m; 0 for none.
        nesterov: look ahead by one step, as PyTorch's SGD does.
        masking: after an entry is sent or applied, forget its velocity (Section 3.3), lest stale momentum push it on.
        clip: the norm to which all of a rank's gradient is clipped, of the sum or the mean as it will be applied;
            each rank's part of it is taken to be 1 / sqrt(P) of the whole (Section 3.2). "median": the median of all
            ranks' norms (`sparsecomm.reducer.clipping`).
        decay: what is left of a residual from one step to the next, as in SparseLoCo (Sarfi et al., 2025, Algorithm 1):
            residual = decay * residual + gradient.

    Raises:
        InvalidInputError: one of them cannot be used.
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: Clip = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= (momentum := number(self.momentum)) < 1:
            raise InvalidInputError(f"momentum={shown(self.momentum)}: expected a number from 0 to below 1")
        clip: Clip = None
        if isinstance(self.clip, str) and self.clip == MEDIAN:
            clip = MEDIAN
        elif self.clip is not None and not 0 < (clip := number(self.clip)) < math.inf:
            raise InvalidInputError(f"clip={shown(self.clip)}: expected a norm above 0, {MEDIAN!r}, or None")
        if not 0 < (decay := number(self.decay)) <= 1:
            raise InvalidInputError(f"decay={shown(self.decay)}: expected a number in (0, 1]; 1 keeps residuals whole")
        flags = {name: flag(name, getattr(self, name)) for name in ("nesterov", "masking")}
        for name, value in {"momentum": momentum, "clip": clip, "decay": decay, **flags}.items():
            object.__setattr__(self, name, value)
        if self.nesterov and not self.momentum:
            raise InvalidInputError("nesterov=True with momentum=0: expected a momentum")

    def clip_factor(self, sum_of_squares: float, P: int, op: str) -> float:
        """Return what a rank's gradients are multiplied by, whose squares add up to ``sum_of_squares``.

        1 where no norm is given by number, or theirs is not finite.
        """
        if not isinstance(self.clip, float) or not math.isfinite(sum_of_squares):
            return 1.0
        norm = math.sqrt(sum_of_squares)
        max_norm = self.clip * (1 / math.sqrt(P) if op == "sum" else math.sqrt(P))
        return max_norm / norm if norm > max_norm else 1.0

    def update(self, u: Array, g: Array, first: bool, done: list[Any] | None = None) -> Array:
        """Update the velocity u, in place, with the gradient g, which may be overwritten.

        Args:
            first: whether it is the first part of this step's gradient; further parts are added.
            done: what an interrupted call has done, and this one adds to; ``g`` is then as it was in the beginning.

        Returns:
            What is to be accumulated: u or g.
        """
        done = [] if done is None else done  # no signal comes between what changes u and the note of it
        if first and not self.nesterov:
            if not done:
                u *= self.momentum
                done.append("decay")
            if len(done) == 1:
                u += g
                done.append("sum")
            return u
        if not done:
            u += g if first or not self.nesterov else self.momentum * g
            done.append("sum")
        if first and len(done) == 1:
            u *= self.momentum
            done.append("decay")
        if first:
            g += u
        elif self.nesterov:
            g *= 1 + self.momentum
        return g
