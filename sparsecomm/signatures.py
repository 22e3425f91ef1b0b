"""Signatures that `help`, notebooks and documentation show, of functions that take ``**options`` for another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["with_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


def with_options(options: type, declared: Callable[..., object], **defaults: object) -> Callable[[_F], _F]:
    """Show the options of a function in its signature. What it does stays as it is.

    Type checkers know them already, by ``**options: Unpack[...]``.

    Args:
        options: the TypedDict of its keyword arguments.
        declared: a function that has parameters of these names; their annotations and defaults are shown.
        defaults: those that differ.
    """
    known = inspect.signature(declared).parameters
    keys = options.__annotations__
    shown = [known[name].replace(default=defaults.get(name, known[name].default)) for name in known if name in keys]

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=own + shown)  # type: ignore[attr-defined]
        return function

    return decorate
