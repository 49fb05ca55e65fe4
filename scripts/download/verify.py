"""Verify model directories: every file's digest against the directory's lock, or against a hub.

python scripts/download/verify.py models/Qwen3-0.6B models/Qwen3-8B
python scripts/download/verify.py models/Qwen3-0.6B --against ms:Qwen/Qwen3-0.6B
python scripts/download/verify.py models/DeepSeek-V2-Lite-Chat --against hf:deepseek-ai/DeepSeek-V2-Lite-Chat

Prints one line a file and exits with 1 when one differs or is missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub import verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--against", metavar="REF", help="hf:org/name or ms:org/name; default: the directory's lock")
    args = parser.parse_args()
    good = True
    try:
        for directory in args.directories:
            found = verify(directory, against=args.against)
            for finding in found.findings:
                print(f"{finding.state:8}{finding.algorithm:9}{finding.actual or '-':65}{directory / finding.path}")
            good = good and found.ok
    except HubError as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
