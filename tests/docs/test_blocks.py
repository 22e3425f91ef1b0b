"""Blocks of a page are found, and run as the page says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.blocks import FailedError, Runner, blocks

PAGE = """
# A page

```python
# add.py: python add.py
import sys
print(sum(map(int, sys.argv[1:])))
```

- In a list:

  ```sh
  export OFFSET=10
  ```

```console
$ python add.py 1 \\
    2 $OFFSET
13
$ echo anything
$ python add.py 7
...7
```

```text
Only shown.
```
"""


def run(tmp_path: Path, text: str, **options: object) -> Runner:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text)
    folder.mkdir(exist_ok=True)
    runner = Runner(folder, dict(os.environ), **options)  # type: ignore[arg-type]
    runner.run_pages(page)
    return runner


def test_files_scripts_and_sessions_run_in_order(tmp_path: Path) -> None:
    runner = run(tmp_path, PAGE)
    assert [place.partition(" ")[0] for place in runner.ran] == ["page.md:12:", *["page.md:16:"] * 3]
    assert (tmp_path / "folder" / "add.py").exists()
    assert runner.environment["OFFSET"] == "10"
    shown = [block.place for block in blocks(tmp_path / "page.md") if block.shown]
    assert shown == ["page.md:25"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```sh\nfalse\ntrue\n```\n", "page.md:1: false\ntrue\nexit status 1"),
        ("```console\n$ true | false | true\n```\n", "exit status 1"),
        ("```console\n$ echo one two\none\n```\n", "expected:\none\nprinted:\none two"),
        ("```console\none\n```\n", "begins with a command"),
        ("```python\nimport this\n```\n", "a block of python begins with `# NAME`"),
    ],
)
def test_a_wrong_page_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(FailedError, match=re.escape(error)):
        run(tmp_path, text)
