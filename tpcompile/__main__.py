"""`python -m tpcompile`."""

import sys

from tpcompile.cli import main

sys.exit(main())
