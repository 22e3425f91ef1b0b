"""The comparison and the broadcast of `LocalSteps.rebuild`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from sparsecomm.calls.label import Label
from sparsecomm.checks import quote
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, text_of
from sparsecomm.local_steps.exchange import Rules
from sparsecomm.local_steps.outer import OuterOptimizer, load_outer
from sparsecomm.reducer.connection import Members
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.states.values import from_bytes, to_bytes
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.transport import Comm, Transport


def compared_settings(
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    rules: Rules,
    density: float,
    options: Mapping[str, object],
) -> dict[str, object]:
    """Return the settings that must be equal on all ranks, by name for an error."""
    return {
        **asdict(rules.schedule),
        "fragment_update_alpha": rules.alpha,
        "density": density,
        "type of outer optimizer": type(rules.outer).__name__,
        **{key: quote(value) for key, value in sorted(options.items()) if key not in ("on_step", "bucket_bytes")},
        **{name: f"{spec.accumulator.name} {spec.shape}" for name, spec in specs.items()},
        "division into fragments": fragments,
    }


def compared_members(
    transport: Transport, before: Comm, joining: bool, step: int, settings: Mapping[str, object], nanoseconds: int
) -> Members:
    """Gather the `Members` of a new communicator, with ``nanoseconds`` of each. Collective.

    If settings differ, all ranks raise an error.
    """
    try:
        library = version("sparsecomm")
    except PackageNotFoundError:  # a checkout that was not installed
        library = "0"
    label = Label.of(("call", "rebuild() of LocalSteps"), ("version of sparsecomm", library), *settings.items())
    try:
        return Members(transport, before, joining, step, [nanoseconds], label)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error}. Create LocalSteps with the same model, settings and version of sparsecomm on all ranks (rank "
            f"{transport.rank} has {library}), and call rebuild again"
        ) from error


def broadcast_outer(
    transport: Transport, root: int, outer: OuterOptimizer | None, specs: Mapping[str, TensorSpec]
) -> None:
    """Load the state of rank ``root``'s outer optimizer on all ranks, or raise an error on all. Collective."""
    data, failed = np.empty(0, np.uint8), ""
    if transport.rank == root:
        try:
            data = to_bytes(None if outer is None else outer.state_dict())
        except Exception as error:  # sent as a length of 0, so that all ranks raise
            failed = f": {text_of(error)}"
    length = np.array([len(data)], "<u8")
    transport.broadcast(length.view(np.uint8), root)
    nbytes, limit = int(length[0]), (64 << 20) + 64 * sum(spec.nbytes for spec in specs.values())
    if not 0 < nbytes <= limit:
        raise InvalidInputError(
            f"rank {transport.rank}: the state of rank {root}'s outer optimizer cannot be sent{failed}. Its state_dict "
            f"must return numbers, strings, arrays, lists and dictionaries, of at most {limit:,} bytes; got {nbytes:,}"
        )
    data = data if transport.rank == root else np.empty(nbytes, np.uint8)
    transport.broadcast(data, root)

    def prepare(undo: Undo) -> Prepared:
        state = from_bytes(data)
        if outer is not None and transport.rank != root:
            state = load_outer(outer, state, specs, undo)
        return Prepared({"outer": state})

    load(transport, "rebuild() of LocalSteps", ["outer"], prepare)
