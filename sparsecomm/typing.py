"""The types of options, for annotations of programs that hand them on.

    from sparsecomm.typing import AlgorithmName, WireName

    def train(algorithm: AlgorithmName = "auto", wire: WireName = "auto") -> None: ...

Type checkers refuse a name that does not exist, and editors complete it. ``algorithm`` also takes an `Algorithm`: for
names that are only known when the program runs, and for algorithms that it has registered, ``sc.algorithms()[name]``.
"""

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.reducer.layout import NamedTensors
from sparsecomm.reducer.options import Clip, OnStep, ReducerOptions, Scope
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.dtypes import DTypeName
from sparsecomm.transport import Comm
from sparsecomm.wire import Op, WireName

__all__ = [
    "AlgorithmName",
    "Clip",
    "Comm",
    "DTypeName",
    "NamedTensors",
    "OnStep",
    "Op",
    "ReducerOptions",
    "Schedule",
    "Scope",
    "State",
    "StateDict",
    "WireName",
]
