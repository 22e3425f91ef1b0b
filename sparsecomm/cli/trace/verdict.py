"""Say which rank is to blame for the first call that did not end well.

Most errors of such a call are consequences: all ranks wait for one that does not come, and time out. The one that did
not wait is the one to look at. Where all waited, it is told who waited for whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sparsecomm.quantities import time_text
from sparsecomm.tracing.events import Call, Communicator, Rank

__all__ = ["verdicts"]

# What a rank raises since another one has left the call, or does not answer.
_CONSEQUENCES = ("TimeoutError", "RankFailedError", "TransportError", "CollectiveMismatchError", "left")


def verdicts(ranks: Mapping[int, Rank]) -> list[str]:
    """Return a text for each communicator with a call that did not end well: what was seen, and whom to look at."""
    communicators = dict.fromkeys(key for rank in ranks.values() for key in rank.calls)
    found = (_verdict(key, ranks) for key in communicators)
    return [text for text in found if text]


def _verdict(communicator: Communicator, ranks: Mapping[int, Rank]) -> str:
    """Return the text for a communicator; empty: all calls ended well, or are under way on no rank."""
    members, _ = communicator
    present = {r: ranks[r].calls.get(communicator, []) for r in members if r in ranks}
    bad = [call for calls in present.values() for call in calls if call.error or call.end is None]
    if not bad:
        return ""
    number = min(call.number for call in bad)
    calls = {r: _numbered(its, number) for r, its in present.items()}
    made = {r: call for r, call in calls.items() if call is not None}
    head = f"Call {number} of {_listed(members)} did not end well: {_most_common(made).what}"
    blamed = (
        _absent(members, ranks)
        or _differ(made)
        or _not_made(number, members, present, ranks)
        or _own_errors(made)
        or _stopped(made, ranks)
        or "All ranks waited, so that messages may have been lost, or one is slow: see who waited for whom."
    )
    return "\n".join([head, *_seen(made), f"=> {blamed}"])


def _numbered(calls: Sequence[Call], number: int) -> Call | None:
    return next((call for call in calls if call.number == number), None)


def _most_common(made: Mapping[int, Call]) -> Call:
    """Return the call that most ranks made."""
    what, _ = Counter(call.what for call in made.values()).most_common(1)[0]
    return next(call for call in made.values() if call.what == what)


def _seen(made: Mapping[int, Call]) -> list[str]:
    """Return a line for each rank: how the call ended there, and whom it waited for."""
    lines = []
    for rank, call in made.items():
        waited = sorted({peer for exchange in call.exchanges if exchange.error for peer in exchange.waited})
        ended = "its file ends within the call" if call.end is None else call.error.split(". ")[0] or "ended well"
        lines.append(f"  rank {rank}: {f'waited for {_listed(waited)}: ' if waited else ''}{ended}")
    return lines


# -- whom to look at: each returns a text, or nothing -----------------------------------------------------------------


def _absent(members: Sequence[int], ranks: Mapping[int, Rank]) -> str:
    absent = [r for r in members if r not in ranks]
    if not absent:
        return ""
    return f"There is no file of {_listed(absent)}. Pass the files of all ranks; a rank that has none made no call."


def _differ(made: Mapping[int, Call]) -> str:
    """Ranks that made another call than most."""
    usual = _most_common(made).what
    others = {r: call.what for r, call in made.items() if call.what != usual}
    if not others:
        return ""
    made_there = "; ".join(f"rank {r} made {what}" for r, what in others.items())
    return f"Look at {_listed(list(others))}: {made_there}."


def _not_made(
    number: int, members: Sequence[int], present: Mapping[int, Sequence[Call]], ranks: Mapping[int, Rank]
) -> str:
    """Ranks that did not come so far."""
    behind = [r for r in members if not any(call.number >= number for call in present[r])]
    if not behind:
        return ""
    parts = []
    for r in behind:
        last = present[r][-1] if present[r] else None
        done = "no call" if last is None else f"{last.number} calls"
        ended = "ended in order then" if ranks[r].ended else "wrote nothing more: it died, or is stuck in the program"
        parts.append(f"rank {r} made {done}, and {ended}")
    return f"Look at {_listed(behind)}, which did not make call {number}: {'; '.join(parts)}."


def _own_errors(made: Mapping[int, Call]) -> str:
    """Ranks that raised something which is no consequence; the first one of them."""
    own = {r: call for r, call in made.items() if call.error and not call.error.startswith(_CONSEQUENCES)}
    if not own:
        return ""
    rank = min(own, key=lambda r: own[r].end or 0.0)
    return f"Look at rank {rank}, which left the call with an error of its own: {own[rank].error}"


def _stopped(made: Mapping[int, Call], ranks: Mapping[int, Rank]) -> str:
    """Ranks whose files end within the call."""
    stopped = [r for r, call in made.items() if call.end is None]
    if not stopped or len(stopped) == len(made):
        return ""
    left = max(call.end or 0.0 for call in made.values())
    silent = ", ".join(time_text(max(0.0, left - ranks[r].last)) for r in stopped)
    return (
        f"Look at {_listed(stopped)}, which began the call and wrote nothing more ({silent} before the others gave "
        "up): it died there, or is stuck."
    )


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
