"""Local steps: ranks train alone for a while, then average by how much their parameters have moved."""

from sparsecomm.local_steps.local_steps import LocalSteps
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer

__all__ = ["LocalSteps", "NesterovSGD", "OuterOptimizer"]
