"""``python -m omniloom``."""

import sys

from omniloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
