"""The documentation reads as plain English: no page and no docstring has a phrase that readers had to read twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "kernels/patches", "tests", "packaging", "bench/slow_network")
BESIDE_CODE = [ROOT / folder / "README.md" for folder in FOLDERS]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *BESIDE_CODE, *(ROOT / "docs").rglob("*.md")])
MODULES = sorted((ROOT / "sparsecomm").rglob("*.py"))
MAX_WORDS = 50  # of a sentence

BANNED = {
    r"of (?:which|whom)": "two sentences",
    r"(?:as|than) ever": "still",
    r"likewise": "also",
    r"be (?:it|they)": "whether",
    r"by and by": "gradually",
    r"for ever": "forever",
    r"(?:those|that) (?:who|which)": "the noun",
    r"such as (?:has|have)": "the noun, with",
    r"(?:where|there|here)(?:of|from|upon|with|by|to|at)": "the noun",
    r"(?:go(?:es)?|went|going) on": "continue",
    r"(?:is|are|was|were) told": "knows, is informed",
    r"tells? (?:of|by)": "describes, shows",
    r"(?:is|are) made (?:from|out) of": "consists of, is built from",
    r"(?:stands?|stood) (?:in|beside|there|once)": "is",
    r"to the good": "better",
    r"from \d+ on": "at least",
    r"in place of": "instead of",
    r"what (?:is|was) (?:left|there|held|kept|made)": "the noun",
    r"(?:is|are|was|were) found out": "is detected",
    r"has to say": "reports",
    r"the less so": "two sentences",
    r"nor (?:is|are|does|do|has|have)": "also not",
    r"so do(?:es)?": "also",
    r"(?:it|they) (?:bears?|wants?)": "allows, needs",
    r"ones own": "your own",
}
BANNED_PHRASE = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|`[^`]*`", re.DOTALL | re.MULTILINE)


def phrases(text: str) -> list[str]:
    """Return the banned phrases of a text."""
    return [match[0] for match in BANNED_PHRASE.finditer(text)]


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page's paragraphs and lists, without tables, headings and code."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", CODE.sub("`x`", page)):
        lines = [line for line in block.splitlines() if not re.match(r"\s*(?:[|#!]|:::)", line)]
        yield from filter(None, re.split(r"(?<=[.:;!?])\s+", " ".join(lines)))


def docstrings(module: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), CODE.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_banned_phrase_and_short_sentences_and_begins_with_its_answer(page: Path) -> None:
    """The first paragraph follows the title, is a paragraph, and is not about the page itself."""
    text = page.read_text()
    assert phrases(CODE.sub("", text)) == []
    assert [sentence for sentence in sentences(text) if len(sentence.split()) > MAX_WORDS] == []
    title, first = text.split("\n\n")[:2]
    if ":::" in (title[:3], first[:3]):  # the docstring of a module begins the page
        return
    assert re.fullmatch(r"# .+", title), title
    assert re.match(r"[\w`\[]", first), first
    assert not re.match(r"(?:This|On this|In this) (?:page|section|document)", first), first


def test_docstrings_have_no_banned_phrase() -> None:
    uses = [
        f"{module.relative_to(ROOT)}:{line}: {phrase}"
        for module in MODULES
        for line, text in docstrings(module)
        for phrase in phrases(text)
    ]
    assert uses == []
