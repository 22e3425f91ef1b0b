"""The command line: ``python -m sparsecomm COMMAND``, also installed as ``sparsecomm COMMAND``.

To add a command, add a module and a line to `COMMANDS`. Besides commands, this folder has only `launch`, which starts
the ranks that run a command. Helpers that benchmarks use, too, are in `sparsecomm.tools`.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from sparsecomm import SparseCommError, __version__
from sparsecomm.cli import bench, info, patch, plan, selftest, trace, tune
from sparsecomm.cli.launch import Refused
from sparsecomm.transport import job

# Each module has a docstring, the long help; `HELP`, one line for the list of commands; `add_arguments(parser)`; and
# `run(arguments)`, which returns the exit status, the same on all ranks. `arguments.line` is the command line.
COMMANDS: dict[str, Any] = {
    "bench": bench,
    "info": info,
    "patch": patch,
    "plan": plan,
    "selftest": selftest,
    "trace": trace,
    "tune": tune,
}


# Errors of writing to standard output. They name no file.
_OUTPUT_ERRORS = errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        if job.rank():  # rank 0 exits first: most launchers then end the other ranks before they repeat the error
            time.sleep(2)
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; return its exit status."""
    if sys.stdout is None:  # the next file to be opened would become standard output
        return _fail("standard output is closed; send it to a file, or to /dev/null")
    parser = _Parser(prog="sparsecomm", description="Sparse allreduce of gradients over MPI or PyTorch process groups.")
    parser.add_argument("--version", action="version", version=f"sparsecomm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.HELP, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    line = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(line, argparse.Namespace(line=line))
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except Refused:
        return 1
    except SparseCommError as error:
        return _fail(str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes to it at exit
        if isinstance(error, BrokenPipeError):  # the reader, for example `head`, has closed the pipe
            return 128 + signal.SIGPIPE
        return _fail(f"standard output cannot be written: {error.strerror}")


def _fail(message: str) -> int:
    """Print an error, and return the exit status."""
    print(f"sparsecomm: {message}", file=sys.stderr)
    return 1
