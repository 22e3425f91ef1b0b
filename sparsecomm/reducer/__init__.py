"""`Reducer`: sums the gradients of a model over all ranks, with residuals, momentum and buckets across steps."""

from sparsecomm.reducer.connection import Rebuilt
from sparsecomm.reducer.options import Warmup
from sparsecomm.reducer.reducer import Reducer
from sparsecomm.reducer.step import Step

__all__ = ["Rebuilt", "Reducer", "Step", "Warmup"]
