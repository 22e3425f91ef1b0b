"""Settings that setup.py refuses, and its cache of compiled files."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.processes import ROOT

RUN = (
    "import runpy, sys; {before}; sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py', run_name='__main__')"
)


def refused(before: str = "pass", **variables: str) -> str:
    command = [sys.executable, "-c", RUN.format(before=before)]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout
    return ran.stderr


def test_an_old_python() -> None:
    assert "sparsecomm needs Python 3.10 or newer: " in refused("sys.version_info = (3, 9, 1)")


def test_a_wrapper_that_is_not_there() -> None:
    output = refused(MPICC="/no/such/mpicc")
    assert "sparsecomm: '/no/such/mpicc' was not found, with MPICC='/no/such/mpicc'." in output
    assert "MPICC= builds without MPI" in output


@pytest.mark.parametrize(
    ("header", "error"),
    [("int an_unknown_mpi;", "is neither Open MPI, nor MPICH, nor of the standard ABI"), (None, "mpi.h")],
)
def test_a_wrapper_of_no_known_mpi(header: str | None, error: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    wrapper = folder / "mpicc"
    command = shlex.join(["cc", f"-I{folder}", "-pthread", "-lmpi"])
    wrapper.write_text(f"#!/bin/sh\necho {shlex.quote(command)}\n")
    wrapper.chmod(0o755)
    if header is not None:
        (folder / "mpi.h").write_text(header)
    output = refused(MPICC=shlex.quote(str(wrapper)), CPATH="")
    assert error in output
    assert f"the MPI of {str(wrapper)!r}" in output


def test_what_has_been_compiled_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache depends on the source, headers and options, but not on dates and folders."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(ROOT)
    compile_cached: Any = runpy.run_path("setup.py")["compile_cached"]
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    monkeypatch.chdir(tmp_path)
    source = Path("a.c")
    source.write_text('#include "h.h"\nint a(void) { return H; }\n')

    def objects(where: str, h: int, *options: str) -> int:
        Path(where).mkdir(exist_ok=True)
        Path(where, "h.h").write_text(f"#define H {h}\n")
        settings = {"output_dir": where, "include_dirs": [where], "macros": [], "extra_postargs": list(options)}
        library = compile_cached(compiler, "a.c", **settings)
        assert Path(library).stat().st_size > 0
        return len(list(Path("build/objects").iterdir()))

    assert [objects("one", 1, "-O1"), objects("two", 1, "-O1")] == [1, 1]
    assert [objects("two", 2, "-O1"), objects("two", 2, "-O2"), objects("one", 1, "-O1")] == [2, 3, 3]
