"""One word for one thing: names that docs/glossary.md has replaced do not come back."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("sparsecomm", "kernels", "bench", "examples", "tests")
SUFFIXES = {".py", ".pyi", ".pyx", ".hpp", ".cpp", ".inl", ".cu", ".cuh"}

# Identifiers and their replacements.
REPLACED = {
    "Line": "CallQueue",
    "line_of": "queue_of",
    "see_to": "run_or_wait",
    "How": "Options",
    "Question": "CostQuery",
    "Ops|CpuOps|CudaOps|arithmetic": "Backend, backend",
    "post|Sending": "isend, Request",
    "Informed|News|_heed_\\w+|attend|enquire|hear|tell|_tell|tidy": "FailureDetector, ControlMessage, check_, poll",
    "meet|meeting": "rendezvous",
    "machines|per_machine|by_machine": "num_nodes, node_of_rank",
    "carrier|Carrier|_carrier": "accumulator",
    "wide|doubles": "int64_indices, float64_values",
    "folded|alike": "rem, mask",
    "places|share|shares": "searchsorted, shard",
    "absorb|joined|concatenated": "add_into, concatenate",
    "aside": "side_stream",
    "edge|edges|Edge": "threshold, boundaries",
    "take_tile|sum_before|last_out|all_blocks": "tile_ticket, exclusive_prefix, is_last_block, grid_barrier",
    "most|least|_most|_least": "max_, min_",
    "at_end": "queue_callback",
}
WORDS = re.compile(rf"\b(?:{'|'.join(REPLACED)})\b")
IN_CPP = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


def sources() -> list[Path]:
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    return [p for p in paths if "_kernels" not in p.parts and p != Path(__file__)]


def identifiers(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of each identifier, except in comments and strings."""
    if path.suffix in {".py", ".pyi"}:
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            return [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]
    text = path.read_text()
    if path.suffix == ".pyx":
        text = re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    else:
        text = IN_CPP.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    return [(text.count("\n", 0, m.start()) + 1, m[0]) for m in re.finditer(r"[A-Za-z_]\w*", text)]


def test_replaced_words_do_not_come_back() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sources()
        for line, word in identifiers(path)
        if WORDS.fullmatch(word)
    ]
    assert uses == [], "see docs/glossary.md"
