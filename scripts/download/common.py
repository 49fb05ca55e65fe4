"""What the two download scripts share: arguments, and one download after the other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub import ModelRef, fetch

DEFAULT = "Qwen/Qwen3-0.6B"
HUBS = {"hf": "huggingface", "ms": "modelscope"}


def main(prefix: str, description: str) -> None:
    """Download the models that the command line names from the hub `prefix` ("hf" or "ms"), each into its directory."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=[DEFAULT], help=f"org/name[@revision], or a model's page; default: {DEFAULT}"
    )
    parser.add_argument("--to", type=Path, default=Path("models"), help="parent directory; default: models")
    parser.add_argument("--dry-run", action="store_true", help="only list the files and their sizes")
    args = parser.parse_args()
    try:
        for model in args.models:
            ref = model if "://" in model else f"{prefix}:{model}"
            name = ModelRef.parse(ref).name.rpartition("/")[2]
            done = fetch(ref, to=args.to / name, hub=HUBS[prefix], dry_run=args.dry_run)
            for file in done.files if args.dry_run else ():
                print(f"{file.size:>14,}  {file.path}")
            size = sum(file.size for file in done.files)
            print(f"{done.directory}: {len(done.files)} files, {size / 1e9:.2f} GB, commit {done.commit[:12]}")
    except HubError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
