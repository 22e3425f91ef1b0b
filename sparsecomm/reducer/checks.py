"""Checks of what a program hands to a reducer. ``who`` begins each message: "rank 3: ", or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from sparsecomm.checks import shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import did_you_mean, listed
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.tensors import interop

__all__ = ["as_gradient", "as_out", "spec_of"]


def spec_of(specs: Mapping[str, TensorSpec], name: str, who: str) -> TensorSpec:
    """Return what is known of the tensor of that name.

    Raises:
        InvalidInputError: there is none.
    """
    if not isinstance(name, str) or name not in specs:
        raise InvalidInputError(
            f"{who}{shown(name)} is no name of this Reducer's {len(specs)} tensors, {listed(specs)}"
            f"{did_you_mean(name, specs)}"
        )
    return specs[name]


def as_gradient(gradient: object, spec: TensorSpec, who: str) -> interop.Tensor:
    """Return the gradient of a tensor, or a part of it.

    Raises:
        InvalidInputError: it does not fit.
    """
    t = interop.tensor(gradient, spec.name)
    if not spec.fits(t):
        raise InvalidInputError(
            f"{who}{spec.name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {spec.shape} "
            f"with sums in {spec.accumulator} on {spec.device}, as when the Reducer was made; make a new one if "
            "the model has changed"
        )
    return t


def as_out(out: object, t: interop.Tensor | None, spec: TensorSpec, who: str) -> interop.Tensor:
    """Return where the sum of a tensor goes, whose gradient is ``t``.

    Raises:
        InvalidInputError: it does not fit, or cannot be written.
    """
    if t is not None:
        return interop.as_out(out, t, name="gradient, which is also out," if out is t.owner else f"out of {spec.name}")
    o = interop.tensor(out, f"out of {spec.name}", writable=True)
    if not spec.fits(o):
        raise InvalidInputError(
            f"{who}out of {spec.name}: got shape {o.shape}, {o.dtype} on {o.device}; expected shape "
            f"{spec.shape} with sums in {spec.accumulator} on {spec.device}"
        )
    return o
