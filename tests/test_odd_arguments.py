"""Any object as an argument is either accepted, or refused by `InvalidInputError` before a call begins."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import patches
from sparsecomm.transport import simulated


class Refusing:
    """An object that raises when it is compared, converted, printed, counted or indexed."""

    def refuse(self, *_: object) -> Any:
        raise RuntimeError("leave me alone")

    __repr__ = __str__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __len__ = refuse
    __iter__ = __float__ = __int__ = __index__ = __getitem__ = __contains__ = refuse  # type: ignore[assignment]


class RefusingNumber(Refusing, int):
    """An int that raises in the same way."""


VALUES = {
    "None": None,
    "True": True,
    "numpy's True": np.True_,
    "0": 0,
    "-1": -1,
    "2**63": 2**63,
    "2**64": 2**64,
    "10**400": 10**400,
    "10**5000": 10**5000,
    "-10**5000": -(10**5000),
    "int64": np.int64(3),
    "float32": np.float32(0.5),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "1e300": 1e300,
    "5e-324": 5e-324,
    "fraction": Fraction(1, 3),
    "large fraction": Fraction(10**400),
    "small fraction": Fraction(1, 10**400),
    "decimal": Decimal("0.5"),
    "decimal NaN": Decimal("NaN"),
    "signaling NaN": Decimal("sNaN"),
    "complex": 1j,
    "text": "a",
    "no text": "",
    "number as text": "0.01",
    "surrogate": "\ud800",
    "bytes": b"a",
    "list": [],
    "list of lists": [[1], [2, 3]],
    "dict": {},
    "dict of None": {"a": None},
    "set": {1},
    "range": range(3),
    "array": np.ones(2),
    "array of 0 dimensions": np.array(0.5),
    "array of ints": np.arange(3),
    "texts": np.array(["a"]),
    "objects": np.array([None, 1], object),
    "masked": np.ma.masked_array(np.ones(10, np.float32), mask=[1] * 10),
    "type": int,
    "function": lambda *_: "nothing",
    "object": object(),
    "refusing": Refusing(),
    "refusing number": RefusingNumber(1),
}

X = np.arange(1, 11, dtype=np.float32)
A = sc.topk(X, 3)
PATCH = patches.diff(X, -X)
Ranks = simulated.SimulatedTransport
Call = Callable[[Ranks, Any], object]


def reducer(tensors: Any = None, density: Any = 0.5, **options: Any) -> sc.Reducer:
    new = sc.Reducer({"a": X} if tensors is None else tensors, density, **options)
    new.reduce({name: X.copy() for name in new.names if new._spec(name).shape == X.shape})
    return new


def local_steps(parameters: Any = None, density: Any = 0.5, **options: Any) -> sc.LocalSteps:
    tensors = {"a": X.copy()} if parameters is None else parameters
    local = sc.LocalSteps(tensors, density, **{"sync_every": 2} | options)
    for _ in range(2):
        local.step(tensors)
    return local


def saved(**options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sc.save(**{"folder": folder, "step": 1, "objects": {"a": 1}} | options)
        sc.load(folder, {}, comm=options["comm"])


def loaded(**options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sc.save(folder, 1, {"a": 1}, comm=options["comm"])
        sc.load(**{"folder": folder, "objects": {"a": 1}} | options)


def published(step: Any = 1, new: Any = None, **options: Any) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        patches.Publisher(**{"tensors": {"a": X}, "folder": folder} | options) as publisher,
    ):
        publisher.publish(0)
        publisher.publish_in_background(step, new)


def subscribed(**options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        patches.Publisher({"a": X}, folder).publish(0)
        patches.Subscriber(**{"tensors": {"a": X.copy()}, "source": folder} | options).update()


def applied(patch: Any = None, tensors: Any = None) -> None:
    with suppress(patches.PatchError):
        patches.apply(PATCH if patch is None else patch, X.copy() if tensors is None else tensors)


def calls_of(function: Callable[..., Any], make: Callable[..., Any] | None = None, **defaults: Any) -> dict[str, Call]:
    """Return a call for each argument of a function, with ``defaults`` for the others; ``make`` makes the call."""
    names = list(inspect.signature(function).parameters)

    def call(name: str) -> Call:
        def program(transport: Ranks, value: Any) -> object:
            comm = {"comm": transport} if "comm" in names else {}
            return (make or function)(**defaults | comm | {name: value})

        return program

    return {f"{function.__name__} {name}": call(name) for name in names if name != "comm"}


CALLS: dict[str, Call] = {
    **calls_of(sc.topk, x=X, k=3),
    **calls_of(sc.threshold, x=X, tau=3),
    **calls_of(sc.merge_topk, a=A, b=A, k=3),
    **calls_of(sc.sparse_allreduce, x=X, k=3),
    **calls_of(sc.isparse_allreduce, lambda **options: sc.isparse_allreduce(**options).wait(), x=X, k=3),
    **calls_of(sc.explain, n=10, k=3),
    **{
        name.replace(" ", "."): call for name, call in calls_of(sc.load, loaded).items()
    },  # these make calls before, to save
    **calls_of(sc.Reducer, reducer),
    **calls_of(sc.LocalSteps, local_steps),
    **calls_of(sc.Warmup, lambda **options: [sc.Warmup(**options)(step) for step in range(20)], density=0.1, steps=10),
    **calls_of(sc.NesterovSGD, lambda **options: sc.NesterovSGD(**options).step("a", X.copy(), X.copy())),
    **calls_of(
        sc.SparseVector, lambda **options: sc.SparseVector(**options).nnz, indices=[1, 4], values=[2.0, 3.0], size=6
    ),
    **{name: call for name, call in calls_of(sc.save, saved).items() if name != "save folder"},
    **calls_of(patches.diff, old=X, new=X),
    **calls_of(patches.apply, applied),
    **{name: call for name, call in calls_of(patches.Publisher, published).items() if name != "Publisher folder"},
    **calls_of(patches.Subscriber, subscribed),
    **calls_of(patches.Folder),
    **calls_of(patches.Http, url="http://127.0.0.1:9/"),
    **calls_of(patches.Ranks, source="."),
    "Publisher.publish step": lambda _, v: published(v),
    "Publisher.publish tensors": lambda _, v: published(new=v),
    "save.values": lambda transport, v: saved(comm=transport, objects={"a": v}),
    "wait timeout": lambda transport, v: sc.isparse_allreduce(X, 3, comm=transport).wait(v),
    "check_weights": lambda transport, v: sc.check_weights(v, comm=transport),
    "register_algorithm": lambda _, v: sc.register_algorithm(v),
    "Reducer.push name": lambda transport, v: reducer(comm=transport).push(v, X),
    "Reducer.push gradient": lambda transport, v: reducer(comm=transport).push("a", v),
    "Reducer.push out": lambda transport, v: reducer(comm=transport).push("a", X, v),
    "Reducer.reduce": lambda transport, v: reducer(comm=transport).reduce(v),
    "Reducer.residual": lambda transport, v: reducer(comm=transport).residual(v),
    "Reducer.scale": lambda transport, v: reducer(comm=transport).scale(v),
    "LocalSteps.step": lambda transport, v: local_steps(comm=transport).step(v),
    "LocalSteps.finish": lambda transport, v: local_steps(comm=transport).finish(v),
    "SparseVector.to_dense": lambda _, v: sc.SparseVector([1], [2.0], 6).to_dense(v),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
def test_each_value_is_accepted_or_refused(call: str) -> None:
    wrong = []
    for name, value in VALUES.items():
        if call.endswith(" on_step") and callable(value):
            continue  # its own errors pass

        def program(transport: Ranks, value: object = value) -> int:
            before = transport.number
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    CALLS[call](transport, value)
            except sc.InvalidInputError:
                return transport.number - before
            return 0

        (result,) = simulated.run(1, program, catch=True)
        if result.error is not None:
            wrong.append(f"{name}: {type(result.error).__name__}: {str(result.error)[:100]}")
        elif result.value and " " in call and "." not in call:  # methods come after a step
            wrong.append(f"{name}: refused after {result.value} calls")
    assert not wrong, "\n".join(wrong)
