"""The course of a benchmark without a server: load, warm up, time, profile, compare, write."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import floor, metrics, peer, routing, session, workloads
from common.monitor import Monitor, Resources
from common.output import figures, gigabytes
from common.runner import Run, run_engine
from common.schema import Result
from common.workloads import Request, Workload
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.outputs import RequestOutputKind


@dataclass
class Measured:
    """The runs of one engine and what they took."""

    load_s: float
    runs: list[Run]
    resources: Resources
    gpus: int

    @property
    def samples(self) -> list[Any]:
        return [run.sample for run in self.runs]

    @property
    def best(self) -> metrics.RunMetrics:
        return metrics.compute([self.samples[metrics.best(self.samples)]], self.gpus)

    @property
    def pooled(self) -> metrics.RunMetrics:
        return metrics.compute(self.samples, self.gpus)

    def as_dict(self) -> dict[str, Any]:
        """For `Result.metrics`: the best run, each run, and all together."""
        return {
            "load_s": self.load_s,
            "best": dataclasses.asdict(self.best),
            "best_run": metrics.best(self.samples),
            "all_runs": dataclasses.asdict(self.pooled),
            "runs": [dataclasses.asdict(metrics.compute([sample], self.gpus)) for sample in self.samples],
            "wall_spread": metrics.spread(self.samples),
            **dataclasses.asdict(self.resources),
        }


def main(name: str, ns: argparse.Namespace, workload: Workload, kind: RequestOutputKind) -> int:
    """Run the benchmark `name` as `ns` says; `workload` counts when no fixed one is named. Returns the exit code."""
    return session.run(lambda scratch: _Benchmark(name, ns, workload, kind, scratch))


class _Benchmark(session.Session):
    def __init__(
        self, name: str, ns: argparse.Namespace, workload: Workload, kind: RequestOutputKind, scratch: Path
    ) -> None:
        super().__init__(name, ns, scratch)
        self.kind = kind
        self.workload = workloads.named(ns.workload) if ns.workload else workload

    def run(self) -> int:
        with self.open() as (engine, load_s):
            requests = self.workload.requests(engine.core.info.vocab_size)
            self._introduce(engine, requests, load_s)
            ours = self._time_engine(engine, requests, load_s)
            result = self._result(engine, ours, requests)
            self._floor(engine, result, requests)
            if self.ns.profile:
                self._profile(engine, requests)
            config, path = engine.config, engine.checkpoint.path
        self._recorded_peer(result, ours)
        if self.ns.peer:
            dummy = config.model.load_format == "dummy"
            self._transformers(result, ours, requests, path, config.model.dtype, config.device, dummy)
        if self.ns.output:
            self.report.write(result, self.ns.output, self.ns.detail)
        return 1 if ours.pooled.errors else 0

    def _introduce(self, engine: LLMEngine, requests: Sequence[Request], load_s: float) -> None:
        self.introduce(engine, load_s)
        inputs, outputs = sum(len(p) for p, _ in requests), sum(m for _, m in requests)
        self.report.say(
            f"{self.ns.workload or 'own workload'}: {len(requests)} requests, {inputs} prompt tokens, {outputs} to "
            f"generate; {self.ns.warmup} warm-up and {self.ns.runs} timed runs"
        )
        if self.ns.uniform_routing:
            self._describe_routing(engine, len(requests))
        self.warn_of_other_work()

    def _describe_routing(self, engine: LLMEngine, rows: int) -> None:
        router = getattr(engine.executor.built.config, "router", None)
        if router is None:
            self.report.say("routing: uniform random, but the model has no experts")
            return
        rows = min(rows, engine.config.scheduler.max_num_seqs)
        touched = routing.experts_touched(router.num_experts, router.top_k, rows, engine.config.device)
        self.report.say(
            f"routing: uniform random; a decode step of {rows} rows touches {touched:.1f} of {router.num_experts} "
            "experts in each layer that has them"
        )

    def _time_engine(self, engine: LLMEngine, requests: Sequence[Request], load_s: float) -> Measured:
        gpus = session.gpus_of(engine.config)
        measured = self._time(lambda: run_engine(engine, requests, self.kind), "run", load_s, gpus)
        self.report.table(figures(measured.best, measured.pooled))
        found = measured.resources
        memory = f"peak memory: {gigabytes(found.peak_rss_bytes)} on the host"
        if gpus:
            use = "unknown" if found.gpu_utilization is None else f"{found.gpu_utilization:.0%}"
            memory += f", {gigabytes(found.peak_gpu_allocated_bytes)} allocated by torch, "
            memory += f"{gigabytes(found.peak_gpu_used_bytes)} of the device in use; GPU utilisation {use}"
        self.report.say(memory)
        return measured

    def _time(self, once: Any, label: str, load_s: float, gpus: int) -> Measured:
        for _ in range(self.ns.warmup):
            once()
        runs: list[Run] = []
        with Monitor(gpus, sample=not self.ns.no_monitor) as monitor:
            for i in range(self.ns.runs):
                runs.append(once())
                self.report.say(f"{label} {i + 1}: {runs[-1].sample.wall_s:.4f} s")
        samples = [run.sample for run in runs]
        self.say_errors(samples)
        noise = metrics.spread(samples)
        if noise is not None:
            self.report.say(f"noise band: {noise:.1%} of the median from the fastest run to the slowest")
        return Measured(load_s, runs, monitor.resources, gpus)

    def _result(self, engine: LLMEngine, ours: Measured, requests: Sequence[Request]) -> Result:
        return self.result(
            self.model_info(engine),
            {"resolved": session.resolved(engine.config)},
            {
                "name": self.ns.workload,
                **dataclasses.asdict(self.workload),
                "requests": len(requests),
                "request_rate": "all at once",
                "sampling": "greedy, end-of-sequence ignored",
                "observed": self.kind.name,
                "prefix_cache": "emptied before each run",
            },
            ours.samples,
            ours.as_dict(),
        )

    def _profile(self, engine: LLMEngine, requests: Sequence[Request]) -> None:
        from common.profiling import profile

        table, trace = profile(engine, requests, self.ns.profile, self.name, self.ns.profile_steps)
        self.report.say(f"\n{table}\ntrace {trace}")

    def _floor(self, engine: LLMEngine, result: Result, requests: Sequence[Request]) -> None:
        peak = floor.MEASURED.get(next(iter(result.environment.gpus), ""))
        model = floor.DenseModel.read(engine.checkpoint.raw)
        if peak is None or model is None or engine.config.device != "cuda" or result.model["dtype"] == "float32":
            return
        least, took = floor.floor_seconds(model, requests, peak), result.metrics["best"]["wall_s"]
        result.metrics["floor_s"] = least
        self.report.say(f"floor, by bytes and operations alone: {least:.3f} s, {least / took:.0%} of the best run")

    def _recorded_peer(self, result: Result, ours: Measured) -> None:
        parallel = result.engine_options["resolved"]["parallel"]
        gpus = result.environment.gpus if ours.gpus else []
        setup = peer.Setup(self.ns.model, self.ns.workload, result.model["dtype"], gpus, **parallel)
        best = ours.best
        found = peer.compare(setup, best.wall_s, best.output_tokens_per_s)
        if found is not None:
            result.peers.append(found)
            self.report.say(peer.describe(found))

    def _transformers(
        self,
        result: Result,
        ours: Measured,
        requests: Sequence[Request],
        path: Path,
        dtype: str,
        device: str,
        dummy: bool,
    ) -> None:
        from common.peer_transformers import TransformersPeer, agreement

        started = time.perf_counter()
        other = TransformersPeer(path, dtype=dtype, device=device, dummy=dummy)
        load_s = time.perf_counter() - started
        size = self.ns.peer_batch_size
        version = result.environment.transformers
        self.report.say(f"\ntransformers {version}: generate, batches of {size or len(requests)}, {dtype}")
        theirs = self._time(lambda: other.run(requests, size), "transformers run", load_s, ours.gpus)
        self.report.table(figures(theirs.best, theirs.pooled))
        ratio = ours.best.output_tokens_per_s / theirs.best.output_tokens_per_s
        share = None if dummy else agreement(ours.runs[0].tokens, theirs.runs[0].tokens)
        self.report.say(f"ratio rapid_infer / transformers, output tokens/s of the best runs: {ratio:.3f}")
        if share is not None:
            self.report.say(f"the same tokens up to the first difference of each request: {share:.1%}")
        result.peers.append(
            {
                "engine": f"transformers {version}",
                "source": "measured",
                "batch_size": size or len(requests),
                "attention": getattr(other.model.config, "_attn_implementation", None),
                "ratio": ratio,
                "token_agreement": share,
                "metrics": theirs.as_dict(),
            }
        )
