"""What the reference adds to signatures: the values of defaults, and the options that functions hand on.

Pages are made of sources alone, in which a default may be the name of a constant, and options are
``**options: Unpack[...]``. The decorator `sparsecomm.checks.with_options` says which options these are, and which
function declares and documents them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

WITH_OPTIONS = "sparsecomm.checks.with_options"
ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n?|\n(?= {4}))*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*|\n(?= {5}))*)$", re.MULTILINE)


class Signatures(griffe.Extension):
    """An extension of griffe, which reads the sources."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete the signatures of a package."""
        for function in list(_functions(pkg)):
            _name_options(pkg, function)
        for function in _functions(pkg):
            for parameter in function.parameters:
                parameter.default = _value(pkg, parameter.default)


def _functions(parent: Any) -> Iterator[griffe.Function]:
    for member in parent.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_class or member.is_module:
            yield from _functions(member)


def _found(pkg: griffe.Module, expression: Any) -> Any:
    """Return the object that an expression names; ``None``: none of the package."""
    path = expression.canonical_path.removeprefix(f"{pkg.name}.")
    try:
        found = pkg[path]
        return found.final_target if found.is_alias else found
    except KeyError:
        return None


def _value(pkg: griffe.Module, default: Any) -> Any:
    """Return a default, or the value of the constant that it names."""
    constant = _found(pkg, default) if isinstance(default, griffe.ExprName) else None
    return constant.value if constant is not None and constant.is_attribute and constant.value else default


def _name_options(pkg: griffe.Module, function: griffe.Function) -> None:
    """Replace ``**options`` by the options of `WITH_OPTIONS`, and add their meanings to the docstring."""
    call = next((d.value for d in function.decorators if d.callable_path == WITH_OPTIONS), None)
    variadic = next((p for p in function.parameters if p.kind is griffe.ParameterKind.var_keyword), None)
    if call is None or variadic is None:
        return
    typed, declared, defaults = _found(pkg, call.arguments[0]), _found(pkg, call.arguments[1]), {}
    _name_options(pkg, declared)  # which may hand on some itself
    for argument in call.arguments[2:]:
        many = isinstance(argument, griffe.ExprVarKeyword)
        defaults |= _items(_found(pkg, argument.value).value) if many else {argument.name: argument.value}
    del function.parameters[variadic.name]
    names = {name for owner in [typed, *typed.mro()] for name in owner.members}
    shown = [parameter for parameter in declared.parameters if parameter.name in names]
    for parameter in shown:
        default = defaults.get(parameter.name, parameter.default)
        kind = griffe.ParameterKind.keyword_only
        function.parameters.add(
            griffe.Parameter(parameter.name, annotation=parameter.annotation, kind=kind, default=default)
        )
    _describe(_docstring(function), [parameter.name for parameter in shown], _docstring(declared))


def _items(dictionary: griffe.ExprDict) -> dict[str, Any]:
    keys = [ast.literal_eval(str(key)) for key in dictionary.keys]
    return dict(zip(keys, dictionary.values, strict=True))


# -- docstrings -------------------------------------------------------------------------------------------------------


def _docstring(function: griffe.Function) -> griffe.Docstring:
    """Return the docstring that describes a function's arguments. For ``__init__`` this may be the class docstring."""
    own, of_class = function.docstring, function.parent.docstring if function.name == "__init__" else None
    return of_class if of_class is not None and ARGUMENTS.search(of_class.value) else own


def _entries(docstring: griffe.Docstring) -> list[tuple[list[str], str]]:
    """Return the names and the text of each entry of a docstring's arguments."""
    block = ARGUMENTS.search(docstring.value)
    return [(names.split(", "), text) for names, text in ENTRY.findall(block[1] if block else "")]


def _describe(docstring: griffe.Docstring, names: list[str], declared: griffe.Docstring) -> None:
    """Add missing options to a docstring. Their texts come from the function that declares the options."""
    own = _entries(docstring)
    known = {name for names_, _ in own for name in names_}
    own = [([name for name in names_ if name != "options"] or names_, text) for names_, text in own]
    for names_, text in _entries(declared):
        lacking = [name for name in names_ if name in names and name not in known]
        own += [(lacking, text)] if lacking else []
    block = "Args:\n" + "".join(f"    {', '.join(names_)}: {text}\n" for names_, text in own)
    docstring.value = ARGUMENTS.sub(lambda _: block, docstring.value)
