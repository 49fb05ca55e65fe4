"""`python -m rapid_infer`: the command line; of several processes that torchrun starts, the first one's."""

import sys

from rapid_infer.executors.external import Launch, follow

if __name__ == "__main__":
    launch = Launch.of_environment()
    if launch is not None and launch.rank > 0:
        sys.exit(follow(launch))
    from rapid_infer.cli import main

    main()
