"""The failure detector, with instant control messages."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.transport import Request, control
from sparsecomm.transport.base import HOST, Bytes, MessageMemory
from sparsecomm.transport.control import (
    CONTENTS,
    LEFT,
    LEFT_BY_DEATH,
    OUT_OF_STEP,
    REALIGN,
    WAITING,
    ControlMessage,
    FailureDetector,
    format_ranks,
)


class Rank(FailureDetector):
    """One of four ranks. It reads messages when `check` is called, and cannot send to ``gone`` ranks."""

    def __init__(self, rank: int, ranks: list[Rank], gone: tuple[int, ...] = ()) -> None:
        super().__init__([0] * 4)
        self.rank, self.size, self.ranks, self.gone = rank, 4, ranks, gone
        self.sent_to: list[int] = []

    def begin(self, call: bytes, mismatch: object = None) -> int:
        def differs(content: bytes, rank: int) -> sc.CollectiveMismatchError:
            return sc.CollectiveMismatchError(f"{call!r} here, {content!r} on rank {rank}")

        number = self._begin_call(call, differs)
        self._drop_old_control()
        return number

    def ping(self, to: int) -> None:
        self._send_control(to, WAITING, self._call)

    def check(self) -> None:
        self._check_leavers()
        self._check_waiters()

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        if to in self.gone:
            raise sc.RankFailedError(f"rank {to} is gone")
        self.sent_to.append(to)
        self.ranks[to]._add_control(ControlMessage(self.rank, self.number, kind, text))

    def _receive_control(self, seconds: float) -> None:
        pass

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        raise NotImplementedError

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        raise NotImplementedError


def four(gone: tuple[int, ...] = ()) -> list[Rank]:
    ranks: list[Rank] = []
    ranks += [Rank(rank, ranks, gone) for rank in range(4)]
    return ranks


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_rank_knows_that_another_one_waits_for_it_in_a_call_that_it_has_not_begun() -> None:
    ranks = four()
    late, other = ranks[0], ranks[1]
    assert not late.awaited(b"exchange")
    for number in (1, 2):
        other.begin(b"exchange" if number == 2 else b"another")
        other.ping(0)
        assert late.awaited(b"exchange") == (number == 2)
        late.begin(b"another" if number == 1 else b"exchange")
        assert not late.awaited(b"exchange")
        late.check()
        for rank in (late, other):
            rank.end()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), sc.TransportError),
        (KeyError("k" * 5000), sc.TransportError),
        (sc.TransportError("no way"), sc.TransportError),
        (sc.TimeoutError("too late"), sc.TransportError),
        (sc.CollectiveMismatchError("not the same"), sc.CollectiveMismatchError),
        (sc.RankFailedError("rank 3 died"), sc.RankFailedError),
        (OSError("cannot read 'caf\udce9.txt'"), sc.TransportError),  # not valid UTF-8
        (TextlessError(), sc.TransportError),
    ],
)
def test_ranks_in_the_call_leave_it_and_send_nothing_more(error: BaseException, kind: type[Exception]) -> None:
    ranks = four(gone=(3,))
    for rank in ranks:
        assert rank.begin(b"call") == 1
    ranks[1].abort(error)
    ranks[1].abort(error)
    assert ranks[1].sent_to == [0, 2]  # once, and not to the rank that is gone
    for rank in (ranks[0], ranks[2]):
        with pytest.raises(
            kind, match=rf"^rank 1 left call 1, which rank {rank.rank} is in\. {type(error).__name__}: "
        ):
            rank.check()
        rank.abort(kind())
        assert rank.sent_to == []
    for rank in ranks[:3]:
        assert rank.begin(b"next") == 2
        rank.check()


def test_control_messages_wait_for_their_call_and_end_with_it() -> None:
    ranks = four()
    for _ in range(3):
        ranks[1].begin(b"call")
    ranks[1].abort(KeyError())
    for number in (1, 2, 3, 4):
        assert ranks[0].begin(b"call") == number
        if number == 3:
            with pytest.raises(sc.TransportError, match="rank 1 left call 3"):
                ranks[0].check()
        else:
            ranks[0].check()
    assert ranks[0]._control == []


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (1, -1, b""),
        (-5, LEFT, b";why"),
        (2**63 - 1, WAITING, b"call"),
        (1, REALIGN, b"\xff" * 8),
        (1, REALIGN, b"\0" * 9),
        (1, LEFT, b"x" * 1001),
        (1, CONTENTS, b"\0"),
        (1, CONTENTS, b"\0\0" + b"x" * 999),
        (1, CONTENTS, b"\0\xffa"),  # too many pieces
        (1, CONTENTS, b"\3\3a"),
    ],
)
def test_what_no_rank_sends_ends_the_call_once(number: int, kind: int, text: bytes) -> None:
    rank = four()[0]
    rank.begin(b"call")
    rank._add_control(ControlMessage(2, number, kind, text))
    with pytest.raises(sc.TransportError, match=r"^rank 0 received from rank 2 a control message .*Install the same"):
        rank.check()
    rank.abort(sc.TransportError())
    assert rank.begin(b"next") == 2
    rank.check()


def test_dead_ranks_that_there_are_not_are_not_named() -> None:
    rank = four()[0]
    rank.begin(b"call")
    head = ",".join(["1", "x", "\u00b2", "-1", "4", "9" * 200, "3"])
    rank._add_control(ControlMessage(2, 1, LEFT_BY_DEATH, f"{head};why".encode()))
    with pytest.raises(sc.RankFailedError, match="why") as caught:
        rank.check()
    assert caught.value.ranks == (1, 3)


def test_a_flood_of_control_messages_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MAX_STORED", 100)
    rank = four()[0]
    rank.begin(b"call")
    for number in range(10_000):
        rank._add_control(ControlMessage(3, 2 + number, LEFT, b";why"))
    assert len(rank._control) == 100
    with pytest.raises(sc.TransportError, match="received from rank 3 one of 100 control messages"):
        rank.check()


def test_a_flood_of_contents_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CONTENTS_TIME", 0.01)
    rank = four()[0]
    rank.begin(b"call")
    for number in range(2, 1000):
        rank._add_control(ControlMessage(3, number, CONTENTS, b"\0\x64" + b"x" * 990))
    rank.check()  # messages about later calls
    assert [len(pieces) for pieces in rank._contents.values()] == [1]
    for _ in range(3):  # twice, and in another order
        for i in (2, 0):
            rank._add_control(ControlMessage(2, 1, CONTENTS, bytes([i, 3, 65 + i])))
    assert rank.exchange_contents(2, b"ours") is None
    rank._add_control(ControlMessage(2, 1, CONTENTS, bytes([1, 3, 66])))
    assert rank.exchange_contents(2, b"ours") == b"ABC"
    for i in range(200):  # with other contents
        rank._add_control(ControlMessage(2, 1, CONTENTS, bytes([i, 201 - i % 2, 65])))
    assert rank.exchange_contents(2, b"ours") is None
    assert [len(pieces) for pieces in rank._contents.values()] == [1, 200]


def test_contents_of_earlier_calls_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CONTENTS_TIME", 0.01)
    ranks = four(gone=(3,))
    for number in (1, 2):
        for rank in ranks:
            assert rank.begin(b"call") == number
        if number == 1:
            assert ranks[1].exchange_contents(0, b"old") is None
            with pytest.raises(sc.CollectiveMismatchError, match="rank 1 found that rank 0 makes another call"):
                ranks[0].check()
            assert ranks[0].exchange_contents(1, b"ours") == b"old"
    for peer in (1, 3):
        assert ranks[0].exchange_contents(peer, b"new") is None
    with pytest.raises(sc.CollectiveMismatchError, match="rank 0 found"):
        ranks[1].check()
    ranks[2].abort(KeyError())
    with pytest.raises(sc.TransportError, match="rank 2 left call 2"):
        ranks[0].exchange_contents(1, b"new")
    assert ranks[1].exchange_contents(0, b"theirs") == b"new"


def test_contents_of_a_later_call_do_not_replace_those_of_this_call() -> None:
    """A rank may be two calls ahead when this rank has read a part of what it sent for this call."""
    rank = four()[1]
    rank.begin(b"call")
    for number, *pieces in ((1, b"\0\2a"), (3, b"\0\2c"), (1, b"\1\2b")):
        rank._add_control(ControlMessage(0, number, CONTENTS, *pieces))
    assert rank.exchange_contents(0, b"ours") == b"ab"


numbers = st.one_of(st.integers(-1, 4), st.sampled_from([2**62 - 1, 2**62]), st.integers(-(2**63), 2**63 - 1))
kinds = st.one_of(
    st.sampled_from([WAITING, LEFT, 2, LEFT_BY_DEATH, OUT_OF_STEP, REALIGN, CONTENTS]), st.integers(0, 255)
)
texts = st.one_of(st.binary(max_size=40), st.binary(min_size=8, max_size=8), st.just(b"\xc2\xb2,1;\xff"))


@settings(max_examples=100)
@given(st.lists(st.builds(ControlMessage, st.integers(1, 3), numbers, kinds, texts), max_size=6))
def test_whatever_ranks_say_calls_end_with_errors_of_the_library(said: list[ControlMessage]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSECOMM_TIMEOUT", "0.001")
        rank = four()[0]
        rank.begin(b"call")
        for message in said:
            rank._add_control(message)
        for _ in range(2 + len(said)):
            try:
                rank.check()
                rank._check_ahead(1, 1e9)
                raise rank._timed_out(1)
            except sc.SparseCommError as error:
                rank.abort(error)
            rank._rounds.clear()
            rank.begin(b"next")
        for message in said:
            rank._add_control(message)
        with contextlib.suppress(sc.TransportError):
            rank.realign()
        assert 0 <= rank.number < 2**62 + 10
        rank.begin(b"next")


def test_ranks_in_words() -> None:
    texts = [format_ranks(ranks) for ranks in ([3], [1, 2], range(8), range(1, 10))]
    assert texts == ["rank 3", "ranks 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7", "ranks 1 ... 9 (9 ranks)"]
