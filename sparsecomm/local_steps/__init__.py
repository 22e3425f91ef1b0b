"""Local steps: workers train alone for a while, and then sum by how much their parameters have moved."""

from sparsecomm.local_steps.local_steps import LocalSteps
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer

__all__ = ["LocalSteps", "NesterovSGD", "OuterOptimizer"]
