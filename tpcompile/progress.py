"""Say on stderr what is being done when it takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST, NEXT = 2.0, 10.0
"""Seconds until the first line, and between the later ones."""


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print `what` once it takes longer than two seconds, then how long it has taken."""
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = FIRST
        while not done.wait(wait):
            print(f"{what} ... {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            wait = NEXT

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
