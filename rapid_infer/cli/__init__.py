"""The command line, `rapid-infer`."""


def main() -> None:
    """Run the command line on `sys.argv` and exit: 0 done, 2 the user's mistake, 1 ours, 130 interrupted."""
    import sys

    try:
        if sys.argv[1:2] == ["--version"]:
            from rapid_infer.cli import streams
            from rapid_infer.version import __version__

            streams.prepare()
            sys.exit(streams.written(lambda: print(f"rapid-infer {__version__}") or 0))
        from rapid_infer.cli.app import run

        run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)
