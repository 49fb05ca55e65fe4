"""For the whole suite: one thread. Tiny models gain nothing from more, and on busy machines threads wait."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
