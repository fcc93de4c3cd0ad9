"""`python -m undercroft`."""

from __future__ import annotations

import sys

from undercroft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
