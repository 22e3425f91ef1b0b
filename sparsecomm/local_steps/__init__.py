"""Local steps: each rank trains alone for a round, then the ranks average the changes of their parameters."""

from sparsecomm.local_steps.local_steps import LocalSteps
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer

__all__ = ["LocalSteps", "NesterovSGD", "OuterOptimizer"]
