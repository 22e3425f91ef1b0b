"""Find the rank that caused the first failed call.

Most errors of a failed call are consequences: all ranks wait for one that does not come, and time out. The rank that
did not wait is the one to look at. If all ranks waited, the verdict says who waited for whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sparsecomm.quantities import time_text
from sparsecomm.tracing.events import Call, Communicator, Rank
from sparsecomm.transport.control import format_ranks

__all__ = ["verdicts"]

# Errors that a rank raises because another one left the call or does not answer.
_CONSEQUENCES = ("TimeoutError", "RankFailedError", "TransportError", "CollectiveMismatchError", "left")


def verdicts(ranks: Mapping[int, Rank]) -> list[str]:
    """Return a text for each communicator with a failed call: how the call ended on each rank, and which to look at."""
    communicators = dict.fromkeys(key for rank in ranks.values() for key in rank.calls)
    return [text for key in communicators if (text := _verdict(key, ranks))]


def _verdict(communicator: Communicator, ranks: Mapping[int, Rank]) -> str:
    members, _ = communicator
    calls = {r: ranks[r].calls.get(communicator, []) for r in members if r in ranks}
    failed = [call.number for each in calls.values() for call in each if call.error or call.end is None]
    if not failed:
        return ""
    number = min(failed)
    made = {r: call for r, each in calls.items() for call in each if call.number == number}
    (usual, _), *_ = Counter(call.what for call in made.values()).most_common(1)
    lines = [f"Call {number} of {format_ranks(members)} did not end well: {usual}"]
    for rank, call in made.items():
        waited = sorted({peer for exchange in call.exchanges if exchange.error for peer in exchange.waited})
        ended = "its file ends within the call" if call.end is None else call.error.split(". ")[0] or "ended well"
        lines.append(f"  rank {rank}: {f'waited for {format_ranks(waited)}: ' if waited else ''}{ended}")
    causes = _causes(number, usual, members, ranks, calls, made)
    return "\n".join([*lines, f"=> {next(causes)}"])


def _causes(
    number: int,
    usual: str,
    members: Sequence[int],
    ranks: Mapping[int, Rank],
    calls: Mapping[int, Sequence[Call]],
    made: Mapping[int, Call],
) -> Iterator[str]:
    """Yield a text for each possible cause of a failed call, the most certain one first."""
    absent = [r for r in members if r not in ranks]
    if absent:
        yield f"There is no file of {format_ranks(absent)}. Pass all files; a rank without one made no call."
    others = {r: call.what for r, call in made.items() if call.what != usual}
    if others:
        differing = "; ".join(f"rank {r} made {what}" for r, what in others.items())
        yield f"Look at {format_ranks(list(others))}: {differing}."
    behind = [r for r in members if not any(call.number >= number for call in calls[r])]
    if behind:
        texts = []
        for r in behind:
            done = f"{calls[r][-1].number} calls" if calls[r] else "no call"
            ended = "ended normally" if ranks[r].ended else "wrote nothing more: it died, or is stuck in the program"
            texts.append(f"rank {r} made {done}, and {ended}")
        yield f"Look at {format_ranks(behind)}, which did not make call {number}: {'; '.join(texts)}."
    own = {r: call for r, call in made.items() if call.error and not call.error.startswith(_CONSEQUENCES)}
    if own:
        rank = min(own, key=lambda r: own[r].end or 0.0)
        yield f"Look at rank {rank}, which left the call with an error of its own: {own[rank].error}"
    stopped = [r for r, call in made.items() if call.end is None]
    if 0 < len(stopped) < len(made):
        left = max(call.end or 0.0 for call in made.values())
        silent = ", ".join(time_text(max(0.0, left - ranks[r].last)) for r in stopped)
        yield (
            f"Look at {format_ranks(stopped)}, which began the call and wrote nothing more ({silent} before the other "
            "ranks gave up): it died there, or is stuck."
        )
    yield "All ranks waited: messages may have been lost, or one rank is slow. See who waited for whom."
