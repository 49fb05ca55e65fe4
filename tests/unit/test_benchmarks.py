"""The benchmarks: figures from hand-made times, the result file, the fixed requests, and both scripts at work."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from common import metrics, monitor, options, peer, workloads
from common.runner import run_engine
from common.schema import Environment, RequestSample, Result, RunSample
from tiny_bench import TINY_CONFIG, start, write_tiny

from rapid_infer.outputs import RequestOutputKind


def request(**changes) -> RequestSample:
    """10 prompt tokens, added at 1 s; tokens at 3, 4, 4.5 and 6 s."""
    values = {"input_tokens": 10, "output_tokens": 4, "start_s": 1.0, "end_s": 6.0, "first_token_s": 3.0}
    return RequestSample(**{**values, "itl_s": [1.0, 0.5, 1.5], **changes})


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_figures_of_one_request() -> None:
    assert metrics.ttft(request()) == 2.0
    assert metrics.e2e(request()) == 5.0
    assert metrics.tpot(request()) == 1.0  # (5 - 2) / (4 - 1)
    assert metrics.tpot(request(output_tokens=1, itl_s=[])) is None
    assert metrics.ttft(request(first_token_s=None)) is None
    assert metrics.tpot(request(first_token_s=None)) is None


def test_tokens_that_come_together_share_their_gap() -> None:
    assert metrics.gaps([(3.0, 1), (4.0, 1), (7.0, 3), (7.5, 1)]) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert metrics.gaps([(3.0, 2)]) == []
    assert metrics.gaps([]) == []


def test_percentiles_interpolate_and_skip_what_is_unknown() -> None:
    found = metrics.summarize([float(i) for i in range(101)] + [None])
    assert found == metrics.Distribution(50.0, 50.0, 90.0, 95.0, 99.0, 0.0, 100.0, 101)
    assert metrics.summarize([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert metrics.summarize([None]) is None


def test_figures_of_a_run() -> None:
    run = RunSample(8.0, [request(), request(output_tokens=6, end_s=8.0), request(error="lost", cached_tokens=3)])
    found = metrics.compute([run], gpus=2)
    assert (found.requests, found.errors, found.error_rate) == (3, 1, pytest.approx(1 / 3))
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (20, 10, 0)
    assert found.output_tokens_per_s == 10 / 8
    assert found.total_tokens_per_s == 30 / 8
    assert found.requests_per_s == 2 / 8
    assert found.tgs == 10 / 8 / 2
    assert found.e2e_s.mean == 6.0
    assert found.itl_s.count == 6
    assert metrics.compute([run]).tgs is None


def test_the_best_run_has_the_fewest_errors_and_the_spread_is_relative() -> None:
    runs = [RunSample(1.0, [request(error="lost")]), RunSample(4.0, [request()]), RunSample(3.0, [request()])]
    assert metrics.best(runs) == 2
    assert metrics.spread(runs) == 1.0
    assert metrics.spread(runs[:1]) is None
    assert metrics.compute(runs).wall_s == 8.0


# --- the result file --------------------------------------------------------------------------------------------------


def result() -> Result:
    environment = Environment(rapid_infer="0.1", commit=None, gpus=["one"], threads=2)
    samples = [RunSample(2.0, [request(), request(first_token_s=None, itl_s=[], error="lost")])]
    return Result("latency", environment, {"name": "tiny"}, {"given": {}}, "python x", {"seqs": 2}, samples, {"a": 1.5})


def test_result_round_trip() -> None:
    assert Result.from_json(result().to_json()) == result()
    assert Result.from_json(result().to_json(detail=False)).samples[0].requests[0].itl_s == []


def test_another_schema_version_is_refused() -> None:
    with pytest.raises(ValueError, match="schema_version is 99, expected 1"):
        Result.from_json(result().to_json().replace('"schema_version": 1', '"schema_version": 99'))


# --- fixed work and recorded numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab_size", "inputs", "outputs", "digest"),
    [
        ("latency-b1", 151936, 128, 256, "1f853e32520658d5"),
        ("latency-b32", 151936, 16384, 8192, "1227adeae28fcdca"),
        ("mixed-256", 151936, 148148, 152793, "bd39e66acf76832e"),
        ("mixed-256", 102400, 142969, 152754, "dbdaf0a1199a54b9"),
        ("shared-prefix", 102400, 540672, 32768, "1ecceb4593d75a61"),
    ],
)
def test_the_requests_are_those_that_peers_were_timed_on(
    name: str, vocab_size: int, inputs: int, outputs: int, digest: str
) -> None:
    requests = workloads.named(name).requests(vocab_size)
    assert (sum(len(p) for p, _ in requests), sum(m for _, m in requests)) == (inputs, outputs)
    text = json.dumps(requests, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_recorded_rows_count_the_same_tokens() -> None:
    for row in peer.recorded()["rows"]:
        vocab_size = workloads.spec()["models"][row["model"]]["vocab_size"]
        if row["workload"] != "mixed-256":
            continue
        requests = workloads.named(row["workload"]).requests(vocab_size)
        assert (row["in_tok"], row["out_tok"]) == (sum(len(p) for p, _ in requests), sum(m for _, m in requests))


def test_a_model_by_name_is_written(tmp_path: Path) -> None:
    path = workloads.write_model("qwen3-0.6b", tmp_path)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 28


def test_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="expected one of latency-b1, latency-b32"):
        workloads.named("mixed")


def test_recorded_peer_and_ratio() -> None:
    setup = peer.Setup("qwen3-8b", "latency-b1", "bfloat16", ["NVIDIA H200"])
    found = peer.compare(setup, wall_s=1.3254, output_tokens_per_s=2 * 256 / 1.3254)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["wall_ratio"] == pytest.approx(1.0)
    assert "ratio 2.000" in peer.describe(found)
    few = peer.Setup("qwen3-8b", "prefill-8k", "bfloat16", ["NVIDIA H200"])
    assert peer.compare(few, wall_s=3.501, output_tokens_per_s=16 / 3.501)["ratio"] == pytest.approx(1.0)
    two = peer.Setup("qwen3-8b", "latency-b1", "bfloat16", ["NVIDIA H200"], tensor_parallel_size=2)
    assert peer.find(two)["s"] == 0.9614
    expert = peer.Setup("qwen3-30b-a3b", "mixed-256", "bfloat16", ["NVIDIA H200"], 2, 2)
    assert peer.find(expert)["s"] == 15.7987


@pytest.mark.parametrize(
    ("dtype", "gpus", "why"), [("float16", ["NVIDIA H200"], "in float16"), ("bfloat16", [], "CPU")]
)
def test_no_ratio_to_a_number_from_elsewhere(dtype: str, gpus: list[str], why: str) -> None:
    found = peer.compare(peer.Setup("qwen3-8b", "latency-b1", dtype, gpus), 1.0, 1.0)
    assert found["ratio"] is None
    assert why in peer.describe(found)
    assert peer.compare(peer.Setup("demo", None, dtype, gpus), 1.0, 1.0) is None


# --- options and monitor ----------------------------------------------------------------------------------------------


def test_options_that_were_not_given_are_left_to_the_engine() -> None:
    ns = options.parser("", "").parse_args(
        ["--dtype", "float32", "--engine", "enforce-eager=true", "--engine", "hub=auto"]
    )
    assert options.engine_kwargs(ns) == {"dtype": "float32", "enforce_eager": True, "hub": "auto"}
    assert options.span("7") == (7, 7)
    assert options.span("7:9") == (7, 9)


def test_samples_of_nvidia_smi() -> None:
    lines = ["GPU-aa, 50, 100", "GPU-bb, 10, 900", "GPU-aa, 100, 300", "GPU-cc, [N/A], 200", "GPU-aa, 4"]
    assert monitor.parse_samples(lines, ["aa", "GPU-cc"]) == (0.75, 500 * 1024**2)
    assert monitor.parse_samples([], ["aa"]) == (None, None)


def test_peak_memory_of_the_host() -> None:
    with monitor.Monitor(0) as watch:
        data = bytearray(1 << 20)
    assert watch.resources.peak_rss_bytes > len(data)
    assert watch.resources.gpu_utilization is None


# --- at work ----------------------------------------------------------------------------------------------------------


def test_both_engines_give_the_same_tokens_and_times_in_order(tmp_path: Path) -> None:
    """Prompts of different lengths, so that the peer's padding on the left is seen to change nothing."""
    from common.peer_transformers import TransformersPeer, agreement
    from transformers import LlamaConfig

    from rapid_infer.llm_engine import LLMEngine
    from rapid_infer.testing import TINY, make_checkpoint

    path = make_checkpoint(tmp_path / "tiny", LlamaConfig(**TINY))
    requests = workloads.Workload(4, (3, 20), (2, 9), prefix=2).requests(TINY["vocab_size"])
    engine = LLMEngine(str(path), skip_tokenizer_init=True, device="cpu", dtype="float32")
    watched = run_engine(engine, requests, RequestOutputKind.DELTA)
    ends = run_engine(engine, requests, RequestOutputKind.FINAL_ONLY)
    engine.close()
    theirs = TransformersPeer(path, dtype="float32", device="cpu", dummy=False).run(requests, batch_size=3)
    assert watched.tokens == ends.tokens
    assert agreement(watched.tokens, theirs.tokens) > 0.9
    assert agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    for run in (watched, theirs):
        for sample, (prompt, wanted) in zip(run.sample.requests, requests):
            assert sample.error is None
            assert (sample.input_tokens, sample.output_tokens, len(sample.itl_s)) == (len(prompt), wanted, wanted - 1)
            assert 0 <= sample.start_s < sample.first_token_s <= sample.end_s <= run.sample.wall_s
            assert sum(sample.itl_s) == pytest.approx(sample.end_s - sample.first_token_s)
    assert all(sample.first_token_s is None and sample.error is None for sample in ends.sample.requests)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def common_arguments(model: Path, output: Path) -> list[str | Path]:
    small = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--runs", "2", "--input-len", "9"]
    return ["--model", model, "--output", output, "--kv-cache-memory-bytes", "4000000", *small]


def test_bench_latency(tiny: Path, tmp_path: Path) -> None:
    output, traces = tmp_path / "results" / "latency.json", tmp_path / "traces"
    own = ["--batch-size", "2", "--output-len", "5", "--detail", "--profile", traces, "--profile-steps", "2"]
    done = start("bench_latency.py", *common_arguments(tiny, output), *own)
    assert done.returncode == 0, done.stderr
    assert "TTFT ms" in done.stdout
    found = Result.from_json(output.read_text())
    assert (found.name, len(found.samples), len(found.samples[0].requests)) == ("latency", 2, 2)
    assert len(found.samples[0].requests[0].itl_s) == 4
    assert found.metrics["all_runs"]["error_rate"] == 0
    assert found.metrics["best"]["output_tokens"] == 10
    assert found.metrics["peak_rss_bytes"] > 0
    assert found.environment.threads == 1
    assert "bench_latency.py --model" in found.command
    assert found.engine_options["given"]["load_format"] == "dummy"
    assert found.command in output.with_suffix(".log").read_text()
    trace = traces / "latency.trace.json"
    assert f"trace {trace}" in done.stdout
    spans = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    assert spans.count("llm_engine.step") == 2


def test_bench_offline_throughput(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "throughput.json"
    own = ["--num-prompts", "3", "--output-len", "2:5", "--prefix-len", "4", "--peer", "transformers"]
    done = start("bench_offline_throughput.py", *common_arguments(tiny, output), *own)
    assert done.returncode == 0, done.stderr
    found = Result.from_json(output.read_text())
    assert found.metrics["best"]["input_tokens"] == 3 * (4 + 9)
    assert found.metrics["best"]["ttft_s"] is None
    assert found.metrics["best"]["output_tokens_per_s"] > 0
    (other,) = found.peers
    assert other["ratio"] > 0
    assert other["metrics"]["best"]["output_tokens"] == found.metrics["best"]["output_tokens"]


def test_bench_parallel_times_one_rank_by_itself(tiny: Path) -> None:
    small = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--runs", "1"]
    done = start("bench_parallel.py", "--model", tiny, *small, "--alone", "1/2", "--workloads", "latency-b1")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 by itself: " in done.stdout
    assert re.search(r"latency-b1: [\d.]+ s, [\d.]+ tok/s, [\d.]+ ms a step", done.stdout)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    done = start("bench_latency.py", "--model", tmp_path / "absent")
    assert done.returncode == 2
    assert done.stderr.startswith("error: model")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("experts", [True, False])
def test_routing_by_a_uniform_draw_says_how_many_experts_a_step_touches(experts: bool, tmp_path: Path) -> None:
    config = dict(TINY_CONFIG)
    if experts:
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **moe}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ("--batch-size", "3", "--input-len", "4", "--output-len", "3", "--runs", "1", "--warmup", "0")
    done = start("bench_latency.py", "--model", tmp_path, "--load-format", "dummy", "--uniform-routing", *sizes)
    assert done.returncode == 0, done.stderr
    if not experts:
        assert "the model has no experts" in done.stdout
        return
    found = re.search(r"a decode step of 3 rows touches ([\d.]+) of 8 experts", done.stdout)
    assert found
    # Six draws of eight: 8 * (1 - (6 / 8) ** 3) in the mean.
    assert 3.5 < float(found[1]) < 5.8
