"""The options that functions pass on are those that the functions which use them declare."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import sparsecomm as sc
from sparsecomm.calls.options import CallOptions, Options
from sparsecomm.reducer.options import ReducerOptions


def test_call_options_are_those_of_the_record_and_of_the_call() -> None:
    keys = set(CallOptions.__annotations__)
    assert keys == {field.name for field in dataclasses.fields(Options)}
    assert keys < inspect.signature(sc.sparse_allreduce).parameters.keys()


def test_reducer_options_are_those_of_the_reducer() -> None:
    parameters = dict(inspect.signature(sc.Reducer).parameters)
    for name in ("tensors", "density", "comm", "skip_nonfinite"):
        del parameters[name]
    declared: dict[str, Any] = ReducerOptions.__annotations__
    assert list(declared) == list(parameters)
    for name, parameter in parameters.items():
        assert declared[name].__forward_arg__ == parameter.annotation, name
