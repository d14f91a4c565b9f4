"""`python -m tpcompile`."""

import sys

from tpcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
