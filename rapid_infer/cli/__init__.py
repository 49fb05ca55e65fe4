"""The command line, `rapid-infer`."""


def main() -> None:
    """Run the command line on `sys.argv` and exit: 0 done, 2 the user's mistake, 1 ours, 130 interrupted."""
    import sys

    if sys.argv[1:2] == ["--version"]:
        from rapid_infer.version import __version__

        print(f"rapid-infer {__version__}")
        return
    from rapid_infer.cli.app import run

    run(sys.argv[1:])
