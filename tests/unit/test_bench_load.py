"""The benchmarks of long prompts beside decode and of prefix caching: their arithmetic, and both at work."""

import re
from pathlib import Path

import pytest
from common.long_context import Course, Load, Setting, observe
from common.schema import Result
from common.workloads import GroupedWorkload
from tiny_bench import start, write_tiny

from rapid_infer.llm_engine import LLMEngine

SMALL = ("--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "4000000")
LOAD = Load(rows=3, prompt=9, longs=2, long_prompt=120, long_output=3, settle=2)
OFF, CHUNKS = Setting("off", 125, False), Setting("chunk 16", 16, True)


def test_a_course_lasts_until_the_slowest_setting_is_done() -> None:
    # 11 tokens of a step of 16 are left beside 3 rows and 2 long prompts.
    assert (OFF.steps(LOAD), CHUNKS.steps(LOAD)) == (1, 11)
    course = Course.plan(LOAD, [OFF, CHUNKS])
    assert (course.interval, course.window) == (33, 66)
    assert course.output >= LOAD.settle + course.window
    assert course.longest == 123
    crowded = Course.plan(Load(3, 9, 2, 120, 3, 2, interval=4), [OFF, CHUNKS])
    assert (crowded.interval, crowded.window) == (4, 22)


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize(("setting", "steps"), [(OFF, 1), (CHUNKS, 10)])
def test_tokens_of_steps_with_a_long_prompt(setting: Setting, steps: int, queue_depth: int, tmp_path: Path) -> None:
    """13 tokens of a step of 16 are left beside 3 rows: ten steps for 120."""
    engine = LLMEngine(
        str(write_tiny(tmp_path / "tiny")),
        load_format="dummy",
        device="cpu",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=4000000,
        max_model_len=125,
        enable_chunked_prefill=setting.chunked,
        max_num_batched_tokens=setting.budget,
        queue_depth=queue_depth,
    )
    course = Course.plan(LOAD, [OFF, CHUNKS])
    alone = observe(engine, course, beside=False, label="alone")
    beside = observe(engine, course, beside=True, label="beside")
    engine.close()
    for found, busy in ((alone, 0), (beside, LOAD.longs * steps)):
        assert found.lasted
        assert (len(found.window), len(found.busy)) == (LOAD.rows * course.window, LOAD.rows * busy)
        assert not any(request.error for request in found.run.sample.requests)
        # Nothing of the long prompts may be known from the rows' prompts.
        assert not any(request.cached_tokens for request in found.run.sample.requests)
    assert alone.run.tokens == beside.run.tokens[: LOAD.rows]
    assert [request.input_tokens for request in beside.run.sample.requests] == [9] * 3 + [120] * 2


def test_groups_share_prefixes_and_nothing_else() -> None:
    work = GroupedWorkload(groups=2, size=3, prefix=20, tail=5, output=4)
    cold, warm = work.requests(211), work.requests(211, part=1)
    assert [p[:20] for p, _ in cold] == [p[:20] for p, _ in warm] == [cold[0][0][:20], cold[1][0][:20]] * 3
    assert len({tuple(p[20:]) for p, _ in cold + warm}) == 12
    assert work.hit_rate(8, filled=True) == 16 / 25
    assert work.hit_rate(8, filled=False) == pytest.approx(2 / 3 * 16 / 25)
    assert work.hit_rate(32, filled=True) == 0


def test_bench_long_context(tmp_path: Path) -> None:
    output = tmp_path / "long.json"
    sizes = ("--rows", "3", "--input-len", "9", "--longs", "2", "--long-len", "120", "--long-output-len", "3")
    course = ("--chunk", "32", "--chunk", "16", "--settle", "2", "--runs", "2", "--warmup", "0")
    arguments = ("--model", write_tiny(tmp_path / "tiny"), "--output", output, *SMALL)
    done = start("bench_long_context.py", *arguments, *sizes, *course)
    assert done.returncode == 0, done.stderr
    found = Result.from_json(output.read_text())
    settings = {one["name"]: one for one in found.metrics["settings"]}
    assert [*settings] == ["off", "chunk 16", "chunk 32"]
    for name, one in settings.items():
        assert one["enable_chunked_prefill"] is (name != "off")
        scheduler = found.engine_options["resolved"][name]["scheduler"]
        assert scheduler["enable_chunked_prefill"] is one["enable_chunked_prefill"]
        assert scheduler["max_num_batched_tokens"] == one["max_num_batched_tokens"]
        # 2 runs of 3 rows in 2 intervals of 33 steps.
        assert one["tpot_alone_s"]["count"] == one["tpot_beside_s"]["count"] == 2 * 3 * 66
        assert one["long_ttft_s"]["count"] == 2 * 2
        assert one["jitter_beside"] == one["tpot_beside_s"]["p99"] / one["tpot_beside_s"]["p50"]
        assert one["preemptions"] == 0
        assert re.search(rf"^{name} .*[+-]\d+\.\d%", done.stdout, re.MULTILINE)
    assert settings["off"]["max_num_batched_tokens"] >= 120 + 3
    assert settings["off"]["long_ttft_over_off"] == 1
    assert [run.label for run in found.samples[:4]] == ["off, alone"] * 2 + ["off, beside"] * 2
    assert "bench_long_context.py --model" in found.command
    assert found.command in output.with_suffix(".log").read_text()


def test_bench_prefix_caching(tmp_path: Path) -> None:
    output = tmp_path / "prefix.json"
    sizes = ("--groups", "2", "--group-size", "3", "--prefix-len", "20", "--tail-len", "5", "--output-len", "4")
    arguments = ("--model", write_tiny(tmp_path / "tiny"), "--output", output, "--engine", "block_size=8", *SMALL)
    done = start("bench_prefix_caching.py", *arguments, *sizes, "--runs", "2")
    assert done.returncode == 0, done.stderr
    found = Result.from_json(output.read_text())
    assert [run.label for run in found.samples] == ["cold", "warm", "cold", "warm", "off", "off"]
    # Two whole blocks of the prefix; the first request of each group fills them.
    expected = {"off": [0] * 6, "cold": [0] * 2 + [16] * 4, "warm": [16] * 6}
    for run in found.samples:
        assert [request.cached_tokens for request in run.requests] == expected[run.label]
    phases = found.metrics["phases"]
    for name, phase in phases.items():
        assert phase["hit_rate"] == phase["possible_hit_rate"] == pytest.approx(sum(expected[name]) / (6 * 25))
        assert phase["all_runs"]["ttft_s"]["count"] == 2 * 6
        assert phase["ttft_p50_off_over_this"] > 0
    resolved = found.engine_options["resolved"]
    assert [resolved[name]["cache"]["enable_prefix_caching"] for name in ("on", "off")] == [True, False]
    assert "note: fewer hits" not in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("bench_long_context.py", ["--long-len", "300"], "max_model_len=256 is the most; lower --long-len"),
        ("bench_long_context.py", ["--chunk", "36"], "--chunk 36 leaves nothing"),
        ("bench_long_context.py", ["--rows", "64"], "need --max-num-seqs 68 or more, got 64"),
        ("bench_long_context.py", ["--max-num-batched-tokens", "99"], "give --chunk instead"),
        ("bench_prefix_caching.py", [], "take 2144 tokens, but max_model_len=256 is the most; shorten --prefix-len"),
    ],
)
def test_mistakes_are_one_line(script: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    done = start(script, "--model", write_tiny(tmp_path / "tiny"), *SMALL, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
