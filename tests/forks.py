"""Runs programs in forks of a process that has already imported their packages, because imports take seconds.

Every test may use the fixture `forks`. Each pytest process starts one server, which imports `COMMON`. For each test
file, a fork of the server imports the file's ``IMPORTS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT, free_port

SETTINGS = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "190"}
SETTINGS |= {"HF_HUB_OFFLINE": "1"}
# PyTorch's optimizers import `torch._dynamo`, which takes as long as importing PyTorch.
COMMON = ("torch._dynamo", "sparsecomm.torch") if find_spec("torch") else ()
HUNG = 124  # the status if ranks were killed because they took too long
Run = Callable[..., tuple[int, str]]
Ask = Callable[[Any], int]
# Reads one task per line, and prints a status for each. {"names"}: a fork imports them, and serves the next tasks until
# null. {"words", ...}: forked ranks run a file or the arguments of "-c" or "-m"; the status is the worst of theirs.
SERVER = (
    f"HUNG = {HUNG}"
    """
import gc, json, os, runpy, sys, time, traceback

def be(words, variables):
    os.environ.update(variables)
    sys.argv[:] = words
    try:
        if words[0] == "-c":
            sys.argv[:] = words[:1] + words[2:]
            exec(compile(words[1], "<program>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1

def run(said, seconds, words, ranks, finalize):
    children, worst, hung, end = [], 0, False, time.monotonic() + seconds
    for variables in ranks:
        if not (child := os.fork()):
            os.setpgid(0, 0)
            to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(to, 1), os.dup2(to, 2)
            status = be(words, variables)
            sys.stdout.flush(), sys.stderr.flush()
            if finalize:
                sys.exit(status)
            os._exit(status)
        children.append(child)
    while children:
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                status = os.waitstatus_to_exitcode(status)
                worst = max(worst, abs(status), key=lambda number: (number > 0, number != 9, number))
                if status not in (0, -9):  # leave the other ranks time to print errors
                    end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            hung = worst in (0, 9)
            for child in children:
                os.killpg(child, 9)
            end = float("inf")
        time.sleep(0.01)
    return HUNG if hung else worst

def serve(names):
    for name in names:
        __import__(name)
    gc.freeze()  # else forks copy the pages of all modules when they collect garbage
    print(0, flush=True)
    while (task := json.loads(sys.stdin.readline() or "null")) is not None:
        if "words" in task:
            print(run(**task), flush=True)
        elif child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            serve(task["names"])
            os._exit(0)

serve(sys.argv[1:])
"""
)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Ask]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER, *_installed(COMMON)]
    with subprocess.Popen(command, env=SETTINGS, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin
        assert server.stdout
        answers = server.stdout

        def ask(task: Any) -> int:
            print(json.dumps(task), file=server.stdin, flush=True)
            answer = answers.readline()
            assert answer, "the fork server has ended"
            return int(answer)

        assert answers.readline() == "0\n"
        yield ask
        server.kill()


def _installed(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if find_spec(name.partition(".")[0])]


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork_server: Ask) -> Iterator[Run]:
    """Return a function that runs a file, or ``-c`` or ``-m``, with words: ``run(*words, ranks=0, **variables)``.

    Ranks have the variables of torchrun; with ``ranks=0`` one process runs without them. The function returns the
    largest exit status or signal number of the ranks, and their output. 9 (SIGKILL) counts only if no rank failed
    otherwise. Some seconds after a rank fails otherwise, the other ranks are killed. Ranks that hang are killed, too;
    the status is then `HUNG`. `COMMON` and the module's ``IMPORTS`` are imported already. With ``finalize``, ranks exit
    through Python's finalization, which takes 0.3 s of CPU time.
    """
    said = tmp_path_factory.mktemp("forks") / "said"

    def run(*words: object, ranks: int = 0, finalize: bool = False, **variables: str) -> tuple[int, str]:
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)) | {"GROUP_RANK": "0"}
        with free_port() as port:
            of_all = sizes | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
            numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            per_rank = [number | of_all | variables for number in numbers]
            said.write_text("")
            job = {"said": str(said), "seconds": LIMIT, "words": list(map(str, words)), "finalize": finalize}
            return fork_server(job | {"ranks": per_rank or [variables]}), said.read_text()

    assert fork_server({"names": _installed(getattr(request.module, "IMPORTS", ()))}) == 0
    yield run
    assert fork_server(None) == 0
