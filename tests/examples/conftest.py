"""A Python process that imports what the examples need once and runs them in forks, since imports take so long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.processes import ENVIRONMENT, LIMIT, free_port

SETTINGS = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "190"}
SETTINGS |= {"HF_HUB_OFFLINE": "1"}
Run = Callable[..., tuple[int, str]]
# For each line of stdin, forks ranks that run a file or the arguments of "-c" or "-m", and prints the worst status.
SERVER = """
import json, os, runpy, sys, time, traceback

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

for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    said, seconds, words, ranks = json.loads(line)
    children, worst, end = [], 0, time.monotonic() + seconds
    for variables in ranks:
        if not (child := os.fork()):
            os.setpgid(0, 0)
            to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(to, 1), os.dup2(to, 2)
            status = be(words, variables)
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        children.append(child)
    while children:
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                status = os.waitstatus_to_exitcode(status)
                worst = max(worst, abs(status))
                if status > 0:  # leave the other ranks time to print errors
                    end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for child in children:
                os.killpg(child, 9)
            end = float("inf")
        time.sleep(0.01)
    print(worst, flush=True)
"""


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function that runs a file, or ``-c`` or ``-m``, with words: ``run(*words, ranks=0, **variables)``.

    Ranks have the variables of torchrun; with ``ranks=0`` one process runs without them. The function returns the
    output of all ranks, and 0 or the largest exit status or signal number. Some seconds after a rank fails, the other
    ranks are killed. The module's ``IMPORTS`` are imported already.
    """
    packages = [name for name in request.module.IMPORTS if find_spec(name.partition(".")[0])]
    command, pipe = [sys.executable, "-c", SERVER, *packages], subprocess.PIPE
    said = tmp_path_factory.mktemp("forks") / "said"
    with subprocess.Popen(command, env=SETTINGS, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin
        assert server.stdout

        def run(*words: object, ranks: int = 0, **variables: str) -> tuple[int, str]:
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)) | {"GROUP_RANK": "0"}
            with free_port() as port:
                of_all = sizes | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
                numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
                per_rank = [number | of_all | variables for number in numbers]
                said.write_text("")
                job = str(said), LIMIT, list(map(str, words)), per_rank or [variables]
                print(json.dumps(job), file=server.stdin, flush=True)
                return int(server.stdout.readline()), said.read_text()

        yield run
        server.kill()
