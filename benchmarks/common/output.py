"""What a benchmark says: a short table for people, a JSON result for machines, and the raw log beside it."""

from __future__ import annotations

import io
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from common.metrics import Distribution, RunMetrics
from common.schema import Result

MS = 1000.0


class Report:
    """Prints lines and keeps them, with the engine's log, for the raw log of the result."""

    def __init__(self) -> None:
        self._log = io.StringIO()
        handler = logging.StreamHandler(self._log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("rapid_infer")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self._log.write(text + "\n")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as their widest cell; all but the first to the right."""
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
            self.say("  ".join(cells).rstrip())

    def write(self, result: Result, path: Path, detail: bool) -> None:
        """Write `path` and, beside it, the same name with .log."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.to_json(detail) + "\n", encoding="utf-8")
        log = path.with_suffix(".log")
        self.say(f"\nresult {path}, log {log}")
        log.write_text(f"$ {result.command}\n{self._log.getvalue()}", encoding="utf-8")


def command_line() -> str:
    """The command as it can be typed again."""
    return shlex.join(["python", *sys.argv])


def figures(best: RunMetrics, pooled: RunMetrics) -> list[list[str]]:
    """Rows of a table: throughput of the best run, latencies of all runs together."""
    rows = [
        ["best run", f"{best.wall_s:.4f} s", "", "", ""],
        ["output tokens/s", f"{best.output_tokens_per_s:.1f}", "", "", ""],
        ["total tokens/s", f"{best.total_tokens_per_s:.1f}", "", "", ""],
        ["requests/s", f"{best.requests_per_s:.2f}", "", "", ""],
    ]
    if best.tgs is not None:
        rows.append(["TGS (output tokens/s/GPU)", f"{best.tgs:.1f}", "", "", ""])
    rows.append(["all runs", "mean", "P50", "P90", "P99"])
    names = [("TTFT ms", pooled.ttft_s), ("TPOT ms", pooled.tpot_s), ("ITL ms", pooled.itl_s)]
    for name, values in [*names, ("end to end ms", pooled.e2e_s)]:
        if values is not None:
            rows.append([name, *_milliseconds(values)])
    rows.append(["error rate", f"{pooled.error_rate:.1%}", "", "", ""])
    return rows


def _milliseconds(d: Distribution) -> list[str]:
    return [f"{value * MS:.2f}" for value in (d.mean, d.p50, d.p90, d.p99)]


def gigabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1024**3:.2f} GiB"
