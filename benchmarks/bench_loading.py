"""Start-up: from a fresh process to the first token, phase by phase, and how fast weights come from files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import environment, options, weight_files, workloads
from common.output import Report, command_line, gigabytes
from common.schema import Result

from rapid_infer import hub
from rapid_infer.errors import RapidInferError

BENCHMARKS = Path(__file__).resolve().parent
EXAMPLES = """\
What it does: starts the engine `--starts` times, each in a process of its own, up to the first token of a short
prompt, and prints how long each phase took: the interpreter, the imports, then the engine's own phases (the spans of
`rapid_infer.profiling`; what lies inside another phase is indented), then the first token. The first column is the
first start; the later ones find warm what it left: compiled kernels, and the files in the system's page cache.

With weights from files it also gives GB/s, beside what one thread reads from the same files: from the disk when
`--cold-files` lets the system forget them first, else from memory. Peak host memory stands beside the size of the
files; mapped file pages count in it for as long as they are mapped.

examples
  the demo model, three starts:
    python benchmarks/bench_loading.py --starts 3
  shape by name with random weights, kernels compiled anew in the first start:
    python benchmarks/bench_loading.py --model qwen3-8b --cold-kernels --output results/start-8b.json
  weights from files that it writes first (16 GB here), read from the disk in the first start:
    python benchmarks/bench_loading.py --model qwen3-8b --write-safetensors /data/bench --cold-files
"""


class Bench:
    def __init__(self, ns: argparse.Namespace, scratch: Path) -> None:
        self.ns, self.scratch = ns, scratch
        self.report = Report()
        self.load_average = environment.load_average()
        self.kwargs = options.engine_kwargs(ns)
        self.model = self._model()
        self.files = [] if self.kwargs.get("load_format") == "dummy" else weight_files.weight_files(Path(self.model))
        self.size = sum(file.stat().st_size for file in self.files)
        self.disk: dict[str, float | None] = {"cold_bytes_per_s": None, "warm_bytes_per_s": None}

    def _model(self) -> str:
        """The directory to start from; written first where that was asked for."""
        name = self.ns.model
        if name not in workloads.model_names():
            if self.ns.write_safetensors:
                raise ValueError(f"--write-safetensors writes {', '.join(workloads.model_names())}, not {name}")
            return str(hub.resolve(name))
        if not self.ns.write_safetensors:
            self.kwargs["load_format"] = "dummy"
            return str(workloads.write_model(name, self.scratch))
        path = self.ns.write_safetensors / name
        size = weight_files.write_checkpoint(workloads.spec()["models"][name], path)
        self.report.say(f"wrote {gigabytes(size)} of random weights to {path}")
        return str(path)

    def run(self) -> int:
        source = f"{gigabytes(self.size)} in {len(self.files)} files" if self.files else "random weights"
        self.report.say(f"loading: {self.ns.model}, {source}, {self.ns.starts} starts")
        if self.files:
            self._read_files()
        starts = []
        for number in range(self.ns.starts):
            if number == 0 and self.ns.cold_files:
                weight_files.drop_from_cache(self.files)
            starts.append(self._start())
            if starts[-1] is None:
                return 1
            self.report.say(f"start {number + 1}: {starts[-1]['total_s']:.2f} s to the first token")
        self._table(starts)
        if self.ns.output:
            self.report.write(self._result(starts), self.ns.output, detail=True)
        return 0

    def _read_files(self) -> None:
        if self.ns.cold_files:
            weight_files.drop_from_cache(self.files)
            self.disk["cold_bytes_per_s"] = weight_files.read_speed(self.files)
        else:
            weight_files.read_speed(self.files)
        self.disk["warm_bytes_per_s"] = weight_files.read_speed(self.files)

    def _start(self) -> dict[str, Any] | None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCHMARKS), env.get("PYTHONPATH"))))
        if self.ns.cold_kernels:
            # The same folder for all starts: empty for the first one, filled by it for the others.
            env["TRITON_CACHE_DIR"] = str(self.scratch / "kernels")
        request = {"model": self.model, "kwargs": self.kwargs, "spawned": time.time()}
        command = [sys.executable, "-m", "common.start_once", json.dumps(request)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            self.report.say(f"the start failed:\n{done.stderr.strip()[-4000:]}")
            return None
        return json.loads(done.stdout.splitlines()[-1])

    def _table(self, starts: list[dict[str, Any]]) -> None:
        columns = [f"start {i + 1}" for i in range(len(starts))]
        rows = [["seconds", *columns]]
        for i, (name, depth, _) in enumerate(starts[0]["phases"]):
            # Every start of the same model goes through the same phases.
            rows.append(["  " * depth + name, *(f"{start['phases'][i][2]:.3f}" for start in starts)])
        rows.append(["total to the first token", *(f"{start['total_s']:.3f}" for start in starts)])
        rows.append(["the same for another prompt", *(f"{start['next_token_s']:.3f}" for start in starts)])
        rows.append(["peak host memory", *(gigabytes(start["peak_rss_bytes"]) for start in starts)])
        rows.append(["  of it before loading", *(gigabytes(start["rss_before_bytes"]) for start in starts)])
        if starts[0]["peak_gpu_allocated_bytes"] is not None:
            rows.append(["peak GPU memory", *(gigabytes(start["peak_gpu_allocated_bytes"]) for start in starts)])
        if self.files:
            rows.append(["weights, GB/s", *(f"{start['bytes_read'] / start['load_s'] / 1e9:.2f}" for start in starts)])
        self.report.table(rows)
        for state, speed in self.disk.items():
            if speed is not None:
                self.report.say(f"one thread reads the files at {speed / 1e9:.2f} GB/s, {state.split('_')[0]}")

    def _result(self, starts: list[dict[str, Any]]) -> Result:
        return Result(
            name="loading",
            environment=environment.collect(self.load_average),
            model={"name": self.ns.model, "weights": "checkpoint" if self.files else "random", "bytes": self.size},
            engine_options={"given": self.kwargs},
            command=command_line(),
            workload={"starts": self.ns.starts, "cold_kernels": self.ns.cold_kernels, "cold_files": self.ns.cold_files},
            samples=[],
            metrics={"starts": starts, "disk": self.disk},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--model",
        default="demo",
        metavar="M",
        help=f"demo, a directory, or random weights in the shape of {', '.join(workloads.model_names())}",
    )
    p.add_argument("--starts", type=options.positive, default=2, metavar="N", help="processes, in turn (default 2)")
    p.add_argument(
        "--cold-kernels", action="store_true", help="the first start finds no compiled kernels, the later ones its own"
    )
    p.add_argument("--cold-files", action="store_true", help="the first start reads the weights from the disk")
    p.add_argument(
        "--write-safetensors",
        type=Path,
        metavar="DIR",
        help="write random weights of --model, named as a checkpoint, to DIR/MODEL and load those; files that are "
        "there already are used again",
    )
    options.add_engine_options(p)
    p.add_argument("--output", type=Path, metavar="FILE.json", help="write the result here, and FILE.log beside it")
    return p


def main() -> int:
    ns = _parser().parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return Bench(ns, Path(scratch)).run()
    except (RapidInferError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
