"""The documentation agrees with the code."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import sparsecomm
from docs import links, reference, tables

ROOT = Path(__file__).parent.parent
FOLDERS = ("sparsecomm", "kernels", "bench", "examples", "packaging", "tests", "docs")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
PAGES = sorted(path for path in FILES if path.suffix == ".md")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(#[^)\s]*)?\)")


def test_tables_are_those_of_the_code() -> None:
    pytest.importorskip("griffe")
    assert [path.name for path in tables.stale()] == [], "run: python docs/tables.py --write"


def test_types_of_options_are_those_declared() -> None:
    old = [path.name for path in tables.SOURCES if tables.options_types(path) != path.read_text()]
    assert old == [], "run: python docs/tables.py --write"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for path, anchor in LINK.findall(page.read_text()):
            target = (page.parent / path).resolve() if path else page
            has_anchors = anchor and target.suffix == ".md"
            if not target.exists() or (has_anchors and anchor not in anchors(target)):
                wrong.append(f"{page.name}: {path}{anchor}")
    assert wrong == []


FILE_NAMES = {file.name for file in FILES}
SOURCES = (".md", ".py", ".pyi", ".pyx", ".pxd", ".c", ".cpp", ".hpp", ".inl", ".cu", ".cuh")
BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
SUFFIX = r"\.(?:pyx?|pyi|pxd|[chi]pp|inl|cuh?|md)"
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*|[\w.*-]+(?:/[\w.*-]+)+{SUFFIX}|[\w*]+(?!\.md){SUFFIX}")
MODULE = re.compile(r"(?<![\w./])(?:sparsecomm|tests|bench|docs)(?:\.\w+)+")
NOT_OURS = {
    *("device_message.py", "script.py", "sgd.py", "sparse_tiny.py", "train.py", "train_tiny.py"),  # made by readers
    "tests/test_scheduler.py",  # of Accelerate
    "sparsecomm/profile.json",  # in the user's cache
}


def missing_files(text: str, folder: Path = ROOT) -> list[str]:
    """Return the files and modules that are named in backticks and do not exist. In a path, ``*`` is a wildcard.

    Commands such as ``python -m bench.model`` count everywhere.
    """
    codes = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    words = {word.strip(",;:()") for code in codes for word in code.split()} - NOT_OURS
    paths = [word for word in words if PATH.fullmatch(word) and "NAME" not in word]
    missing = [path for path in paths if not file_exists(path, folder)]
    named = [name for code in codes for name in MODULE.findall(code)] + re.findall(r"-m (bench(?:\.\w+)+)", text)
    return missing + [name for name in named if not module_exists(name)]


def file_exists(path: str, folder: Path) -> bool:
    if "/" not in path:
        return bool(fnmatch.filter(FILE_NAMES, path))
    return any(any(root.glob(path.rstrip("/"))) for root in (ROOT, ROOT / "sparsecomm", folder))


def module_exists(name: str) -> bool:
    """Return whether a module exists and contains the next part of ``name``, if there is one."""
    path, parts = ROOT, name.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    module = next((file for file in path.glob("*.py*") if [file.stem] == parts[:1]), None)
    attribute = parts[module is not None :][:1]
    text = (module or path / "__init__.py").read_text() if attribute else ""
    return all(re.search(rf"\b{name}\b", text) for name in attribute)


def test_files_and_modules_that_are_named_exist() -> None:
    sources = [file for file in FILES if file.suffix in SOURCES and file.name != "CHANGELOG.md"]
    missing = {str(file): missing_files(file.read_text(), file.parent) for file in sources}
    assert {file: names for file, names in missing.items() if names} == {}


def test_the_glossary_names_the_right_files() -> None:
    """For "`name` in `file`", the file contains the name."""
    entries = re.findall(r"`([\w.]+)` in\s+`([\w/]+\.\w+)`", (ROOT / "docs" / "glossary.md").read_text())
    assert len(entries) > 20
    for name, path in entries:
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", (ROOT / path).read_text()), f"{name} in {path}"


def test_one_place_knows_the_address_of_the_repository() -> None:
    address = links.repository().partition("://")[2]
    listed = ["git", "grep", "-lIF", "--untracked", address]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if files.returncode > 1:
        pytest.skip("needs a clone")
    assert files.stdout.split() == ["pyproject.toml"]


REFERENCE = {page.stem: page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")}


@pytest.mark.parametrize("name", ["sparsecomm", *(f"sparsecomm.{m}" for m in ("torch", "jax", "patches", "testing"))])
def test_public_names_are_in_the_reference_and_have_docstrings(name: str) -> None:
    if name in ("sparsecomm.torch", "sparsecomm.jax"):
        pytest.importorskip(name.removeprefix("sparsecomm."))
    module = importlib.import_module(name)
    assert module.__doc__
    listed = {path for text in REFERENCE.values() for path in reference.entries_of(text)}
    for public in module.__all__:
        obj = getattr(module, public)
        if public.startswith("__") or inspect.ismodule(obj):
            continue
        path = (
            "sparsecomm.api.algorithms" if obj is sparsecomm.algorithms else f"{name}.{public}"
        )  # the package has the same name
        assert path in listed, f"docs/reference.py does not list {path}, or no page has its table"
        assert not callable(obj) or (obj.__doc__ or "").strip(), f"{name}.{public} has no docstring"
        for member, value in vars(obj).items() if inspect.isclass(obj) else ():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(obj, member)), f"{name}.{public}.{member} has no docstring"


SHOWN_WITH_OPTIONS = {
    "sparsecomm": ["LocalSteps", "Reducer"],
    "sparsecomm.torch": ["DiLoCo", "DistributedOptimizer", "SparseAdamW", "SparseState", "register", "register_fsdp"],
    "sparsecomm.jax": ["LocalSteps", "sparse_adamw", "sparse_allreduce", "sparsify"],
}


def test_the_reference_shows_options_with_defaults_and_meanings() -> None:
    """Compare with `inspect` at run time, because the reference is built from sources alone."""
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(ROOT / "docs" / "signatures.py")
    sources = griffe.load("sparsecomm", search_paths=[ROOT], extensions=extensions, allow_inspection=False)
    for module, names in SHOWN_WITH_OPTIONS.items():
        package = importlib.import_module(module) if "." not in module else pytest.importorskip(module)
        for name in names:
            function, path = getattr(package, name), f"{module}.{name}".removeprefix("sparsecomm.")
            shown = sources[path].final_target
            parameters = {p.name: str(p.default) for p in shown.parameters if p.name != "self"}
            for expected in inspect.signature(function).parameters.values():
                default = parameters.pop(expected.name)
                if expected.default is not expected.empty:
                    assert eval(default, vars(sparsecomm)) == expected.default, f"{name}: {expected}"
            assert parameters == {}
            entries = re.findall(r"^    (\w[\w, ]*): ", shown.docstring.value, re.MULTILINE)
            documented = {word for entry in entries for word in entry.split(", ")}
            assert documented >= inspect.signature(function).parameters.keys() - {"self"}, name


def test_settings_are_those_that_the_library_reads() -> None:
    files = [file for file in (ROOT / "sparsecomm").rglob("*.py*") if file.suffix in (".py", ".pyx")]
    source = "".join(file.read_text() for file in files)
    read = set(re.findall(r"[\"'](SPARSECOMM_[A-Z_]+)[\"']", source))
    assert set(re.findall(r"^\| `(SPARSECOMM_[A-Z_]+)` \|", REFERENCE["cli"], re.MULTILINE)) == read


def test_layers_are_those_of_the_contract() -> None:
    """The order is the same. Only the drawing has the kernels and the package's public names."""
    drawing = (ROOT / "docs" / "internals" / "architecture.md").read_text().split("```")[1]
    drawn = [re.split(r"\s{4,}", line)[0].split() for line in drawing.strip().splitlines()]
    settings = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [line.split(" | ") for line in re.findall(r'"([^"]*)"', settings)]
    below = {"__main__", "_kernels", "processor", "_built"}
    remaining = [set(layer) for layer in layers if not below & set(layer)]
    of_drawing = [{*layer} - {"sparsecomm"} for layer in drawn if not any("/" in name for name in layer)]
    contract = [name for layer in remaining for name in sorted(layer)]
    assert [name for layer in of_drawing for name in sorted(layer)] == contract


def test_commands_have_a_section_with_their_options() -> None:
    from sparsecomm.cli import COMMANDS

    for name in COMMANDS:
        assert re.search(rf"^## {name}$", REFERENCE["cli"], re.MULTILINE)
