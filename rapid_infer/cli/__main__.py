"""`python -m rapid_infer.cli`, where the `rapid-infer` script is not installed."""

from rapid_infer.cli import main

if __name__ == "__main__":
    main()
