"""The command line: ``python -m sparsecomm``."""

import sys

from sparsecomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
