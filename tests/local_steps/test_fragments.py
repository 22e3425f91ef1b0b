"""The fragments of a model, and when each is synchronised."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm.local_steps.fragments import split_by_size
from sparsecomm.local_steps.schedule import SyncSchedule

CHECK = settings(max_examples=300)


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    sync_every = draw(st.integers(1, 40))
    return SyncSchedule(sync_every, draw(st.integers(1, sync_every)), draw(st.integers(0, sync_every - 1)))


@CHECK
@given(schedules())
def test_each_fragment_is_exchanged_once_in_a_round_and_never_twice_at_a_time(schedule: SyncSchedule) -> None:
    H, F, d = schedule.sync_every, schedule.fragments, schedule.delay
    under_way: dict[int, tuple[int, int]] = {}  # by fragment: the round, and the step of the beginning
    last = dict.fromkeys(range(F), 0)
    applied = []
    for step in range(1, 4 * H + 1):
        for fragment, round_no in schedule.begins(step):
            assert fragment not in under_way
            assert schedule.steps_between(fragment, round_no) == step - last[fragment] > 0
            under_way[fragment], last[fragment] = (round_no, step), step
        for fragment in schedule.applies(step):
            round_no, begun = under_way.pop(fragment)
            assert step == round_no * H + (fragment + 1) * H // F
            assert begun == max(1, step - d)
            applied.append((round_no, fragment))
    assert applied == [(round_no, fragment) for round_no in range(4) for fragment in range(F)]


@CHECK
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_a_model_is_split_into_neighbours_of_about_one_size(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    parts = split_by_size(named, count)
    assert [name for part in parts for name in part] == list(named)
    assert len(parts) == count
    assert all(parts)
    largest = max(sum(named[name] for name in part) for part in parts)
    assert largest <= sum(sizes) / count + 2 * max(sizes)


def test_equal_tensors_are_split_equally() -> None:
    assert [len(part) for part in split_by_size({f"p{i}": 10 for i in range(12)}, 4)] == [3, 3, 3, 3]
