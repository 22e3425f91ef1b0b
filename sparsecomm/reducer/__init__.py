"""State of many named gradients across steps: residuals by name, buckets, momentum, counters, checkpoints."""

from sparsecomm.reducer.rebuild import Rebuilt
from sparsecomm.reducer.reducer import Reducer
from sparsecomm.reducer.schedule import Warmup
from sparsecomm.reducer.step import Step

__all__ = ["Rebuilt", "Reducer", "Step", "Warmup"]
