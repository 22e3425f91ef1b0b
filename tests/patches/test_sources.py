"""`Http`, against servers that break, lie and dawdle; and `Folder`. No update hangs, or leaves wrong weights."""

from __future__ import annotations

import http.server
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches import Folder, Http, Publisher, Subscriber
from sparsecomm.patches.versions import MANIFEST, File, Version, dump

Handler = http.server.BaseHTTPRequestHandler
Answer = Callable[[Handler, bytes, int], object]


@contextmanager
def server(handler: Any) -> Iterator[str]:
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/weights/"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class Nasty:
    """Serves a folder, but sends ``answer`` to the first ``times`` requests for files whose names contain ``name``."""

    def __init__(self, folder: Path, answer: Answer, times: int, name: str) -> None:
        self.requests: list[tuple[str, str | None]] = []
        nasty, counts = self, dict[str, int]()

        class OneRequest(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:  # noqa: N802
                asked = self.path.rpartition("/")[2]
                nasty.requests.append((asked, self.headers["Range"]))
                path = folder / asked
                data = path.read_bytes() if path.exists() else None
                counts[asked] = counts.get(asked, 0) + 1
                self.close_connection = True
                if data is not None and name in asked and counts[asked] <= times:
                    answer(self, data, counts[asked])
                elif data is None:
                    send(self, b"no such file", 404)
                else:
                    begin = int((self.headers["Range"] or "bytes=0-")[6:-1])
                    if begin >= len(data):
                        send(self, b"", 416)
                    else:
                        send(self, data[begin:], 206 if begin else 200, begin=begin)

            def log_message(self, *_: object) -> None:
                pass

        self.handler = OneRequest


def send(
    handler: Handler, body: bytes, status: int = 200, *, begin: int = 0, length: object = None, **headers: str
) -> None:
    handler.send_response(status)
    if length != -1:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    if status == 206:
        handler.send_header("Content-Range", f"bytes {begin}-{begin + len(body) - 1}/{begin + len(body)}")
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def half(handler: Handler, data: bytes, number: int) -> None:
    send(handler, data[: len(data) // 2], length=len(data))


def after_half(answer: Answer) -> Answer:
    return lambda handler, data, number: (half if number == 1 else answer)(handler, data, number)


def chunk_cut_off(handler: Handler, data: bytes, number: int) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\nhal" % len(data))


def slow(handler: Handler, data: bytes, number: int) -> None:
    half(handler, data, number)
    handler.wfile.flush()
    threading.Event().wait(1)


ANSWERS: dict[str, Answer] = {
    "half": half,
    "slow": slow,
    "chunk cut off": chunk_cut_off,
    "whole, but longer": lambda handler, data, _: send(handler, data, length=len(data) + 9),
    "without length": lambda handler, data, _: send(handler, data, length=-1),
    "length no number": lambda handler, data, _: send(handler, data, length="many"),
    "no range": after_half(lambda handler, data, _: send(handler, data)),
    "other range": after_half(lambda handler, data, _: send(handler, data[5:], 206, begin=5)),
    "range of other bytes": after_half(lambda handler, data, _: send(handler, data, 206, begin=1, length=-1)),
    "no answer": lambda handler, *_: handler.connection.close(),
    "no HTTP": lambda handler, *_: handler.wfile.write(b"\0\xff not HTTP\r\n\r\n"),
    "error": lambda handler, _, number: send(handler, b"<html>busy</html>", (500, 503, 429)[number % 3]),
    "long header": lambda handler, data, _: send(handler, data, x="y" * 100_000),
    "redirected in circles": lambda handler, *_: send(handler, b"", 302, Location=handler.path),
    "redirected to a file": lambda handler, *_: send(handler, b"", 302, Location="file:///etc/passwd"),
}
every_answer = pytest.mark.parametrize("answer", ANSWERS)


def impatient(url: str, answer: str, retries: int = 5) -> Http:
    """Return a source with a short timeout for slow answers, which good answers may exceed on a busy machine."""
    return Http(url, timeout=0.1, retries=retries + 10) if answer == "slow" else Http(url, retries=retries)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A folder with an anchor and two patches, and the weights of each."""
    folder, x, arrays = tmp_path_factory.mktemp("published"), np.random.default_rng(1).standard_normal(3000), []
    with Publisher(x, folder) as publisher:
        for step in range(3):
            x[step::50] += 1
            publisher.publish(step)
            arrays.append(x.copy())
    return folder, arrays


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep
    monkeypatch.setattr("sparsecomm.patches.sources.time.sleep", lambda seconds: sleep(min(seconds, 0.001)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [MANIFEST, ".gz", ".patch"])
@every_answer
def test_requests_are_repeated_after_nasty_answers(
    answer: str, name: str, published: tuple[Path, list[np.ndarray]]
) -> None:
    folder, versions = published
    with server(Nasty(folder, ANSWERS[answer], 2, name).handler) as url:
        subscriber = Subscriber(np.zeros(3000), impatient(url, answer))
        assert (subscriber.update(), subscriber.problems) == (2, [])
        assert (subscriber.tensors[""] == versions[2]).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [MANIFEST, ".gz", ".patch"])
@every_answer
def test_answers_that_remain_nasty_leave_no_wrong_weights(
    answer: str, name: str, published: tuple[Path, list[np.ndarray]]
) -> None:
    folder, versions = published
    with server(Nasty(folder, ANSWERS[answer], 10**6, name).handler) as url:
        x, step = np.zeros(3000), None
        subscriber = Subscriber(x, impatient(url, answer, retries=1))
        with suppress(PatchError) if name == MANIFEST else nullcontext():
            step = subscriber.update()
        assert (x == (0 if step is None else versions[step])).all()
        if answer == "without length":
            assert step == 2
        elif name != MANIFEST:
            assert (step is None) == (name == ".gz") or step == 2


def endless(handler: Handler, data: bytes, number: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(bytes(1 << 16))


@pytest.mark.parametrize("name", [".gz", ".patch"])
def test_endless_answers_end(name: str, published: tuple[Path, list[np.ndarray]]) -> None:
    with server(Nasty(published[0], endless, 10**6, name).handler) as url:
        subscriber = Subscriber(np.zeros(3000), Http(url))
        assert subscriber.update() == (None if name == ".gz" else 0)
        assert "more than the expected" in subscriber.problems[0]


def test_an_interrupted_download_continues_where_it_stopped(published: tuple[Path, list[np.ndarray]]) -> None:
    nasty = Nasty(published[0], half, 1, ".gz")
    size = next(published[0].glob("*.gz")).stat().st_size
    with server(nasty.handler) as url:
        assert Subscriber(np.zeros(3000), url).update() == 2
    assert [ranges for name, ranges in nasty.requests if ".gz" in name] == [None, f"bytes={size // 2}-"]


def test_a_list_of_versions_is_never_a_mixture_of_two(tmp_path: Path, published: tuple[Path, list[np.ndarray]]) -> None:
    """Unlike other files, it may change between two attempts."""
    versions = [Version(i, i, "0" * 32, "", None, None) for i in range(1, 5)]

    def replaced(handler: Handler, data: bytes, number: int) -> None:
        half(handler, data, number)
        (tmp_path / MANIFEST).write_bytes(dump([version._replace(step=9) for version in versions]))

    (tmp_path / MANIFEST).write_bytes(dump(versions))
    with server(Nasty(tmp_path, replaced, 1, MANIFEST).handler) as url, Http(url).fetch(MANIFEST, 10**6) as file:
        assert file.read() == (tmp_path / MANIFEST).read_bytes()


@pytest.mark.parametrize("status", [404, 403, 410])
def test_missing_files(status: int, published: tuple[Path, list[np.ndarray]], tmp_path: Path) -> None:
    def missing(handler: Handler, data: bytes, number: int) -> None:
        send(handler, b"no", status)

    nasty = Nasty(published[0], missing, 10**6, "")
    with server(nasty.handler) as url:
        subscriber = Subscriber(np.zeros(3000), url)
        assert subscriber.update() is None
        assert len(nasty.requests) == 1
        with pytest.raises(FileNotFoundError):
            Http(url).fetch("x", 5)
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path).fetch("x", 5)
    assert Subscriber(np.zeros(3), tmp_path).update() is None
    (tmp_path / "x").write_bytes(b"123456")
    with pytest.raises(OSError, match="6 bytes; expected at most 5"):
        Folder(tmp_path).fetch("x", 5)
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(PatchError, match="cannot be read"):
        Subscriber(np.zeros(3), tmp_path).update()


def test_lists_with_huge_sizes_take_no_memory(tmp_path: Path, published: tuple[Path, list[np.ndarray]]) -> None:
    folder, versions = published
    x = versions[0].copy()
    data = (folder / MANIFEST).read_bytes()
    subscriber = Subscriber(x, tmp_path)
    (tmp_path / "big.patch").write_bytes(b"")
    with open(tmp_path / "big.patch", "r+b") as file:
        file.truncate(1 << 40)  # without blocks on the disk
    (tmp_path / MANIFEST).write_bytes(data)
    before = Subscriber(versions[0].copy(), folder)
    assert before.update() == 2
    id_of = Version(9, 9, "1" * 32, "", None, File("big.patch", 1 << 40))
    tracemalloc.start()
    try:
        for size in (1 << 40, 10_000):
            (tmp_path / MANIFEST).write_bytes(dump([id_of._replace(anchor=File("big.patch", size))]))
            assert subscriber.update() is None
            assert "bytes; " in subscriber.problems[0]
        with open(tmp_path / MANIFEST, "r+b") as file:
            file.truncate(1 << 40)
        with pytest.raises(PatchError, match="bytes; expected at most"):
            subscriber.update()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (x == versions[0]).all()


def test_arguments_are_checked() -> None:
    for wrong in ({"url": "ftp://x"}, {"url": 5}, {"timeout": 0}, {"timeout": "x"}, {"retries": -1}, {"retries": 1.5}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            Http(**({"url": "http://x"} | wrong))
