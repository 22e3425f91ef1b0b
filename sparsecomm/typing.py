"""Types of options, for annotations in programs that pass them on.

    from sparsecomm.typing import AlgorithmName, WireName

    def train(algorithm: AlgorithmName = "auto", wire: WireName = "auto") -> None: ...

Type checkers reject unknown names. For a name that is only known at run time, or for an algorithm that the program
registered, pass an `Algorithm` as ``algorithm``: ``sc.algorithms()[name]``.
"""

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.calls.nodes import NodesOption
from sparsecomm.reducer.options import Clip, OnStep, ReducerOptions, Schedule, Scope
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import TensorLike
from sparsecomm.tensors.dtypes import DTypeName
from sparsecomm.tensors.interop import NamedTensors
from sparsecomm.transport import Comm
from sparsecomm.wire import Op, WireName

__all__ = [
    "AlgorithmName", "Clip", "Comm", "DTypeName", "NamedTensors", "NodesOption", "OnStep", "Op", "ReducerOptions",
    "Schedule", "Scope", "State", "StateDict", "TensorLike", "WireName",
]  # fmt: skip
