"""The options that local steps and their adapters share, and the defaults for the options of a `Reducer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from sparsecomm.algorithms import AlgorithmName, Comparison, find, name_of
from sparsecomm.checks import quote, to_bool, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.schedule import SyncSchedule
from sparsecomm.options import Unpack
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps

_FEWEST_BYTES, _BEST_LOSS = "split:2", "allgather"
DEFAULTS: Final[ReducerOptions] = {
    "scope": "chunk",
    "algorithm": "auto",
    "op": "mean_of_contributors",
    "decay": 0.8,
    "wire": "packed_int2",
    "bucket_bytes": 1 << 40,  # one call for all tensors of a fragment: they are ready together
}


@dataclass(frozen=True, kw_only=True)
class LocalStepsSettings:
    """The options of `sparsecomm.LocalSteps` and its adapters, besides those of a `Reducer`.

    Attributes:
        sync_every: number of local steps in a round; with ``by_speed``, the average over the ranks.
        by_speed: faster ranks take more local steps in a round. Train until `round` reaches a limit.
        deadline: a multiple, above 1, of the expected time to an exchange. A rank that is later is left out of the
            exchange, and its `round` may rise by several. The constructor is then collective, and every rank is a node
            (``nodes=False``). ``None``: no deadline.
        fragment_sync_delay: number of local steps between the beginning of an exchange and its application.
        fragment_update_alpha: an exchange sets local = alpha * local + (1 - alpha) * global. With a delay, 0 discards
            the local steps taken since the exchange began.
        skip_nonfinite: as in `Reducer`.
    """

    sync_every: int = 30
    by_speed: bool = False
    deadline: float | None = None
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    skip_nonfinite: bool = True

    def __post_init__(self) -> None:
        alpha = to_float(self.fragment_update_alpha)
        if not 0 <= alpha <= 1:
            raise InvalidInputError(f"fragment_update_alpha={quote(self.fragment_update_alpha)}: must be from 0 to 1")
        object.__setattr__(self, "fragment_update_alpha", alpha)
        object.__setattr__(self, "skip_nonfinite", to_bool("skip_nonfinite", self.skip_nonfinite))

    def schedule(self, num_fragments: int) -> SyncSchedule:
        """Return the schedule, which checks the other options."""
        return SyncSchedule(
            self.sync_every,
            fragments=num_fragments,
            delay=self.fragment_sync_delay,
            by_speed=self.by_speed,
            deadline=self.deadline,
        )


# declared above: LocalStepsOptions(ReducerOptions) of LocalStepsSettings
class LocalStepsOptions(ReducerOptions, total=False):
    sync_every: int
    by_speed: bool
    deadline: float | None
    fragment_sync_delay: int
    fragment_update_alpha: float
    skip_nonfinite: bool


def split_options(options: Mapping[str, Any]) -> tuple[LocalStepsSettings, ReducerOptions]:
    """Return the settings in the options that a user passed, and the options of reducers."""
    own = {field.name for field in fields(LocalStepsSettings)}
    settings = LocalStepsSettings(**{name: value for name, value in options.items() if name in own})
    return settings, cast("ReducerOptions", {name: value for name, value in options.items() if name not in own})


def auto_algorithm(sync_every: int) -> Comparison:
    """Return the choice that "auto" stands for: of two algorithms, the one that reaches the same loss in less time.

    `_FEWEST_BYTES` needs more rounds than `_BEST_LOSS`, so its predicted time is multiplied by the ratio of rounds
    (docs/reports/local-steps.md). The time of local steps is not counted, which favours `_FEWEST_BYTES`.
    """
    H = min(sync_every, TRAINED[_FEWEST_BYTES][-1][0])
    more = round(relative_steps(nats(_FEWEST_BYTES, H)) / relative_steps(nats(_BEST_LOSS, H)), 2)
    return Comparison(((_FEWEST_BYTES, max(more, 1.0)), (_BEST_LOSS, 1.0)))


def with_defaults(specs: Iterable[TensorSpec], sync_every: int, **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with `DEFAULTS` adapted to the other options.

    Not every algorithm counts contributors, a dense sum leaves no residual to decay, and float64 sums are sent exactly.
    """
    name: str | Comparison = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    name = auto_algorithm(sync_every) if isinstance(name, str) and name == "auto" else name
    algorithm = find(name)  # None for a choice of several; then one that counts contributors is chosen
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.cannot_count_contributors:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": cast("AlgorithmName", name)}
