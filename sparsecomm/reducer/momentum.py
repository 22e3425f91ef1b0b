"""Momentum correction and clipping, which change a gradient before it is added to the residual; and residual decay.

Lin et al., Deep Gradient Compression (ICLR 2018), Sections 3.1 to 3.3. A residual of plain gradients would make the
optimizer's momentum count the steps for which an entry has waited wrongly. So momentum is applied on each rank,
before the residual: the velocity is what accumulates, and the optimizer has no momentum of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from sparsecomm.checks import quote, to_bool, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.sparse import Array

__all__ = ["Clip", "MomentumCorrection"]

Clip: TypeAlias = "float | None"


@dataclass(frozen=True)
class MomentumCorrection:
    """The settings of momentum correction, clipping and decay, and their arithmetic.

    Attributes:
        momentum: m; 0 for none.
        nesterov: look ahead by one step, as PyTorch's SGD does.
        masking: after an entry is sent or applied, forget its velocity (Section 3.3), lest stale momentum push it on.
        clip: the norm to which all of a rank's gradient is clipped, of the sum or the mean as it will be applied;
            each rank's part of it is taken to be 1 / sqrt(P) of the whole (Section 3.2).
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
        if not 0 <= (momentum := to_float(self.momentum)) < 1:
            raise InvalidInputError(f"momentum={quote(self.momentum)}: expected a number from 0 to below 1")
        clip = None
        if self.clip is not None and not 0 < (clip := to_float(self.clip)) < math.inf:
            raise InvalidInputError(f"clip={quote(self.clip)}: expected a norm above 0, or None")
        if not 0 < (decay := to_float(self.decay)) <= 1:
            raise InvalidInputError(f"decay={quote(self.decay)}: expected a number in (0, 1]; 1 keeps residuals whole")
        flags = {name: to_bool(name, getattr(self, name)) for name in ("nesterov", "masking")}
        for name, value in {"momentum": momentum, "clip": clip, "decay": decay, **flags}.items():
            object.__setattr__(self, name, value)
        if self.nesterov and not self.momentum:
            raise InvalidInputError("nesterov=True with momentum=0: expected a momentum")

    def clip_factor(self, sum_of_squares: float, P: int, op: str) -> float:
        """Return what a rank's gradients are multiplied by, whose squares add up to ``sum_of_squares``.

        1 where their norm is not finite.
        """
        norm = math.sqrt(sum_of_squares)
        if self.clip is None or not math.isfinite(norm):
            return 1.0
        max_norm = self.clip * (1 / math.sqrt(P) if op == "sum" else math.sqrt(P))
        return max_norm / norm if norm > max_norm else 1.0

    def update(self, u: Array, g: Array, first: bool) -> Array:
        """Update the velocity u, in place, with the gradient g, which may be overwritten.

        Args:
            first: whether it is the first part of this step's gradient; further parts are added.

        Returns:
            What is to be accumulated: u or g.
        """
        if first and not self.nesterov:
            u *= self.momentum
            u += g
            return u
        u += g if first or not self.nesterov else self.momentum * g
        if first:
            u *= self.momentum
            g += u
        elif self.nesterov:
            g *= 1 + self.momentum
        return g
