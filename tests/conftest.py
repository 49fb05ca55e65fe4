"""For the whole suite: one thread. Tiny models gain nothing from more, and on busy machines they wait for each other.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
