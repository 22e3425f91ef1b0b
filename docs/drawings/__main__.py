"""Say which drawings are out of date, or bring them up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

import docs.drawings
from docs.drawings.pictures import PICTURES

IMAGES = Path(__file__).parent.parent / "images"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m docs.drawings",
        description=docs.drawings.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="bring the drawings up to date")
    write, stale = parser.parse_args().write, 0
    for name, draw in PICTURES.items():
        path, drawn = IMAGES / f"{name}.svg", draw()
        if not path.exists() or path.read_text() != drawn:
            stale += 1
            print(f"{path.name}: {'written' if write else 'out of date: python -m docs.drawings --write'}")
            if write:
                path.write_text(drawn)
    return 1 if stale and not write else 0


if __name__ == "__main__":
    raise SystemExit(main())
