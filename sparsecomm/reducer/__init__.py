"""State of many named gradients across steps: residuals by name, buckets, momentum, counters, checkpoints."""

from sparsecomm.reducer.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.schedule import Warmup
from sparsecomm.reducer.state import reshard

__all__ = ["Rebuilt", "Reducer", "Step", "Warmup", "reshard"]
