"""Draw a trace: ranks from left to right, steps from top to bottom, an arrow per message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from docs.drawings.svg import Canvas
from docs.drawings.traces import Message, Trace

__all__ = ["Holdings", "holdings", "timeline"]

# What each rank holds: by rank, for each part of the vector, the ranks whose contributions are in it.
Holdings = list[list[frozenset[int]]]
PartsOf = Callable[[Message], Sequence[int]]

_SIDE, _HEAD, _CAPTION, _BOX, _WIDTH = 14, 34, 20, 22, 52


def holdings(trace: Trace, start: Holdings, parts_of: PartsOf) -> list[Holdings]:
    """Return what each rank holds after each step, from before the first one on.

    Args:
        start: what each rank holds at first.
        parts_of: the parts that a message holds.
    """
    states = [start]
    for step in range(trace.steps):
        now = [list(parts) for parts in states[-1]]
        for message in trace.messages:
            if message.received == step + 1 and message.kind != "words":
                sent = states[message.sent][message.sender]
                for part in parts_of(message):
                    now[message.receiver][part] |= sent[part]
        states.append(now)
    return states


def timeline(trace: Trace, title: str, phases: Sequence[tuple[int, str]], states: list[Holdings]) -> str:
    """Return a drawing.

    Args:
        phases: how many steps each phase takes, and its name; all steps in all.
        states: as by `holdings`.

    Raises:
        ValueError: the phases do not take as many steps as the trace has.
    """
    if sum(steps for steps, _ in phases) != trace.steps:
        raise ValueError(f"{title}: the phases {phases} do not take {trace.steps} steps")
    column = 88 if trace.size < 6 else 68
    canvas, width = Canvas(title), 2 * _SIDE + column * trace.size
    names = {sum(steps for steps, _ in phases[:i]): name for i, (_, name) in enumerate(phases)}
    xs = [_SIDE + column * (rank + 0.5) for rank in range(trace.size)]
    top = _heads(canvas, trace, xs)
    ys = [top + 16.0]
    for step in range(trace.steps):
        ys.append(ys[-1] + _CAPTION + _row(trace, step))
    _lanes(canvas, trace, xs, top, ys[-1])
    largest = max((message.items for message in trace.messages if message.kind != "words"), default=1)
    for step in range(trace.steps):
        messages = [message for message in trace.messages if message.sent == step]
        top = ys[step] + _BOX / 2 + 7
        canvas.box(4, top, width - 8, _CAPTION, "band", 3)
        canvas.text(10, top + 14, names.get(step, ""), "small head")
        canvas.text(width - 10, top + 14, _amount(trace, messages), "small end")
        for message in messages:
            begin = top + _CAPTION + 2
            end = ys[message.received] + (10 if message.kind == "words" else -_BOX / 2 - 3)
            thickness = 1.3 if message.kind == "words" else 1.3 + 2.7 * message.items / largest
            x0, x1 = xs[message.sender], xs[message.receiver]
            if _all_to_all(trace, messages):  # arrows begin beside each other, by receiver, and end by sender
                x0, x1 = x0 + _port(trace, message.receiver), x1 + _port(trace, message.sender)
                thickness = min(thickness, 2.2)
            canvas.arrow(x0, begin, x1, end, message.kind, thickness)
    for step, state in enumerate(states):
        for rank, parts in enumerate(state):
            if step in (0, trace.steps) or parts != states[step - 1][rank]:
                _held(canvas, trace, xs[rank], ys[step], parts)
    return canvas.svg(width, ys[-1] + _BOX / 2 + _SIDE)


def _row(trace: Trace, step: int) -> float:
    """Return the height of a step: what is sent far needs more, what leaves no box behind needs less."""
    messages = [message for message in trace.messages if message.received == step + 1]
    farthest = max(abs(message.sender - message.receiver) for message in messages)
    if _all_to_all(trace, messages):
        return 50 + 20 * farthest
    return 32 if all(message.kind == "words" for message in messages) else 52 + 5 * farthest


def _all_to_all(trace: Trace, messages: Sequence[Message]) -> bool:
    return len(messages) == trace.size * (trace.size - 1) > 2


def _port(trace: Trace, other: int) -> float:
    """Return where an arrow to or from rank ``other`` touches a rank's column, from its middle."""
    return (other - (trace.size - 1) / 2) * _WIDTH / trace.size


def _heads(canvas: Canvas, trace: Trace, xs: list[float]) -> float:
    """Name the ranks, and their nodes where several are on one; return where the names end."""
    nodes, below = sorted(set(trace.node_of_rank)), 0
    if len(nodes) < trace.size:
        below = 18
        for node in nodes:
            its = [x for x, at in zip(xs, trace.node_of_rank, strict=True) if at == node]
            canvas.text(sum(its) / len(its), 20, f"node {node}", "head middle")
    for rank, x in enumerate(xs):
        canvas.text(x, 20 + below, f"rank {rank}", "head middle")
    return _HEAD + below


def _lanes(canvas: Canvas, trace: Trace, xs: list[float], top: float, bottom: float) -> None:
    """Draw a line for each rank, and one between nodes."""
    for rank, x in enumerate(xs):
        canvas.line(x, top, x, bottom, "lane")
        if (
            rank
            and len(set(trace.node_of_rank)) < trace.size
            and trace.node_of_rank[rank - 1] != trace.node_of_rank[rank]
        ):
            between = (x + xs[rank - 1]) / 2
            canvas.line(between, 6, between, bottom + _BOX / 2, "border")


def _amount(trace: Trace, messages: list[Message]) -> str:
    """Return what each message of a step holds, in words."""
    kind = messages[0].kind
    if kind == "words":
        return "a few integers"
    unit, whole = ("n elements", trace.n) if kind == "dense" else ("k entries", trace.k)
    low, high = (each(message.items for message in messages) / whole for each in (min, max))
    return _times(high, unit) if high - low < 0.3 * high else f"{_times(low, unit)} to {_times(high, unit)}"


def _times(factor: float, unit: str) -> str:
    if factor > 0.95:
        return unit if round(factor) == 1 else f"{round(factor)} {unit}"
    letter, name = unit.split()
    return f"{letter}/{round(1 / factor)} {name}"


def _held(canvas: Canvas, trace: Trace, x: float, y: float, parts: list[frozenset[int]]) -> None:
    """Draw what a rank holds: one part as text, several as a bar each, filled as far as ranks are in it."""
    top = y - _BOX / 2
    if len(parts) == 1:
        whole = len(parts[0]) == trace.size
        canvas.box(x - _WIDTH / 2, top, _WIDTH, _BOX, "whole" if whole else "box", 5)
        canvas.text(x, y + 4.5, _ranks(parts[0]), "small middle on" if whole else "small middle")
        return
    width = _WIDTH / len(parts)
    for part, ranks in enumerate(parts):
        left, share = x - _WIDTH / 2 + part * width, len(ranks) / trace.size
        canvas.box(left, top, width, _BOX, "box")
        if ranks:
            height = share * (_BOX - 2)
            canvas.box(left + 1, top + _BOX - 1 - height, width - 2, height, "whole" if share == 1 else "part")


def _ranks(ranks: frozenset[int]) -> str:
    """Return ranks in words: 0-3, or 1+3."""
    listed = sorted(ranks)
    if len(listed) > 1 and listed[-1] - listed[0] == len(listed) - 1:
        return f"{listed[0]}\N{EN DASH}{listed[-1]}"
    return "+".join(map(str, listed))
