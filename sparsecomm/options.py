"""Options that several functions accept: one class declares them, and `with_options` completes the functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sparsecomm.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = Any  # only type checkers read ``**options: Unpack[...]``

_MEANT = {"k": "density", "warmup": "dense_steps"}  # names that users try
_BLOCK = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 {4}.*\n?|\n(?=\1 {4}))*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*|\n(?= {5}))*)$", re.MULTILINE)
_F = TypeVar("_F", bound=Callable[..., Any])


def with_options(options: type, *declared: Callable[..., object], **defaults: object) -> Callable[[_F], _F]:
    """Return a decorator that replaces ``**options`` in a function's signature with the single keyword arguments.

    `help`, notebooks and the documentation show this signature. Type checkers use ``**options: Unpack[...]`` instead.
    The TypedDict ``options`` names the arguments. Their annotations, defaults and descriptions are those of
    ``declared``, functions or classes, the first that has them; ``defaults`` replaces some defaults. A docstring with a
    section of arguments gets the descriptions that it lacks.
    """
    keywords: dict[str, inspect.Parameter] = {}
    for parameters in (inspect.signature(declaration).parameters for declaration in declared):
        for name in parameters.keys() & options.__annotations__.keys() - keywords.keys():
            default = defaults.get(name, parameters[name].default)
            keywords[name] = parameters[name].replace(default=default, kind=inspect.Parameter.KEYWORD_ONLY)
    texts = [text for declaration in declared for text in _docstrings(declaration)]

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [keywords[name] for name in options.__annotations__ if name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=own + shared)  # type: ignore[attr-defined]
        function.__doc__ = documented(function.__doc__, [p.name for p in (*own, *shared)], texts)
        return function

    return decorate


def check_options(function: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` if ``options`` are not all keyword arguments of ``function``, which the user called."""
    if options:
        known = inspect.signature(function).parameters
        for name in sorted(options.keys() - known.keys()):
            meant = did_you_mean(_MEANT.get(name, name), known)
            expected = f"expected some of {', '.join(known)}{meant}"
            raise InvalidInputError(f"{name} is not an option of {function.__name__}; {expected}")


def _docstrings(declaration: Callable[..., object]) -> list[str | None]:
    if not isinstance(declaration, type):
        return [declaration.__doc__]
    return [text for kind in declaration.__mro__[:-1] for text in (kind.__doc__, vars(kind)["__init__"].__doc__)]


def documented(docstring: str | None, names: Sequence[str], sources: Sequence[str | None]) -> str | None:
    """Return a docstring in which all ``names`` are described, as far as it or the other docstrings describe them.

    Its entry ``options`` goes if it only refers to other text. A docstring without a section of arguments is returned.
    """
    block = _BLOCK.search(docstring or "")
    if docstring and block is None:
        return docstring
    entries = [([name for name in described if name != "options"], text) for described, text in _entries(docstring)]
    entries = [(described or ["options"], text) for described, text in entries if described or text[:4] != "see "]
    known = {name for described, _ in entries for name in described}
    for described, text in (entry for source in sources for entry in _entries(source)):
        if missing := [name for name in described if name in names and name not in known]:
            entries.append((missing, text))
            known.update(missing)
    if not entries:
        return docstring
    indent = "" if block is None else block[1]
    lines = "".join(f"    {', '.join(described)}: {text}\n" for described, text in entries)
    new = f"{indent}Args:\n" + "".join(f"{indent}{line}" for line in lines.splitlines(keepends=True))
    return new if block is None or docstring is None else docstring[: block.start()] + new + docstring[block.end() :]


def _entries(docstring: str | None) -> list[tuple[list[str], str]]:
    """Return the names and the text of each entry of a docstring's arguments or attributes."""
    block = _BLOCK.search(docstring or "")
    lines = "" if block is None else re.sub(f"^{block[1]}", "", block[2], flags=re.MULTILINE)
    return [(names.split(", "), text) for names, text in _ENTRY.findall(lines)]
