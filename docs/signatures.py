"""What the reference adds to signatures: the values of defaults, and the options that functions hand on.

Pages are made of sources alone, in which a default may be the name of a constant, and options are
``**options: Unpack[...]``. The decorator `sparsecomm.options.with_options` says which options these are, and what
declares and documents them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe

from sparsecomm.options import documented

WITH_OPTIONS = "sparsecomm.options.with_options"


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
        member = pkg[path]
        return member.final_target if member.is_alias else member
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
    typed, *declared = (_found(pkg, argument) for argument in call.arguments if not _is_keyword(argument))
    defaults: dict[str, Any] = {}
    for argument in filter(_is_keyword, call.arguments):
        many = isinstance(argument, griffe.ExprVarKeyword)
        defaults |= _items(_found(pkg, argument.value).value) if many else {argument.name: argument.value}
    del function.parameters[variadic.name]
    own = {parameter.name for parameter in function.parameters}
    fields = [parameter for declaration in declared for parameter in _fields(pkg, declaration)]
    for name in (name for owner in [*reversed(typed.mro()), typed] for name in owner.members):
        if name not in own:
            field = next(field for field in fields if field.name == name)
            default = defaults.get(name, field.default)
            kind = griffe.ParameterKind.keyword_only
            function.parameters.add(griffe.Parameter(name, annotation=field.annotation, kind=kind, default=default))
    docstring, names = _docstring(function), [parameter.name for parameter in function.parameters]
    texts = [text for declaration in declared for text in _docstrings(declaration)]
    docstring.value = documented(docstring.value, names, texts)


def _is_keyword(argument: Any) -> bool:
    return isinstance(argument, (griffe.ExprKeyword, griffe.ExprVarKeyword))


def _fields(pkg: griffe.Module, declaration: Any) -> list[griffe.Parameter]:
    """Return the parameters of a function or a class, which may itself pass options on."""
    if declaration.is_function:
        _name_options(pkg, declaration)
        return list(declaration.parameters)
    if "__init__" in declaration.members:
        return _fields(pkg, declaration.members["__init__"])
    kind, classes = griffe.ParameterKind.keyword_only, [declaration, *declaration.mro()]  # a dataclass
    members = [member for owner in classes for member in owner.members.values() if member.is_attribute]
    return [griffe.Parameter(m.name, annotation=m.annotation, kind=kind, default=m.value) for m in members]


def _docstrings(declaration: Any) -> list[str | None]:
    documented = [declaration] if declaration.is_function else [declaration, *declaration.mro()]
    documented += [declaration.members["__init__"]] if "__init__" in declaration.members else []
    return [member.docstring.value if member.docstring else None for member in documented]


def _items(dictionary: griffe.ExprDict) -> dict[str, Any]:
    keys = [ast.literal_eval(str(key)) for key in dictionary.keys]
    return dict(zip(keys, dictionary.values, strict=True))


def _docstring(function: griffe.Function) -> griffe.Docstring:
    """Return the docstring that describes a function's arguments. For ``__init__`` this may be the class docstring."""
    of_class = function.parent.docstring if function.name == "__init__" else None
    return of_class if of_class is not None and "\nArgs:\n" in of_class.value else function.docstring
