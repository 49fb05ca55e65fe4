"""`AsyncLLM` gives what `LLM` gives, to many at once, and neither side hangs or stays behind when the other goes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rapid_infer import LLM, AsyncLLM, RequestOutput, SamplingParams
from rapid_infer.errors import ConfigError, EngineDeadError, HubError, RequestError, WeightError
from rapid_infer.ipc.messages import AddRequest, Stats
from rapid_infer.outputs import RequestOutputKind
from rapid_infer.processes.channel import frame
from rapid_infer.testing import TINY, make_checkpoint

T = TypeVar("T")
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
TOKENS_ONLY: dict[str, Any] = {**OPTIONS, "skip_tokenizer_init": True}
PROMPT = list(range(40, 75))
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=300)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose token i is the word w<i>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), Qwen3Config(**TINY, head_dim=16), generation={"temperature": 0.5, "top_k": 7}
    )
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(path, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(engine: AsyncLLM) -> Iterator[AsyncLLM]:
    """The engine that most tests share. When a test is done, no request and no block may be left in it."""
    yield engine
    # The engine itself checks, whenever it runs out of work, that every block is accounted for.
    assert run(idle(engine))
    assert not engine.outputs


@pytest.fixture(scope="module")
def offline(path: str) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as llm:
        yield llm


def run(work: Awaitable[T], timeout: float = 20) -> T:
    return asyncio.run(asyncio.wait_for(work, timeout))


async def collect(llm: AsyncLLM, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(*args, **kwargs)]


async def tokens(llm: AsyncLLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return (await collect(llm, prompt, params, output_kind=FINAL))[-1].outputs[0].token_ids


async def until(llm: AsyncLLM, wanted: Callable[[Stats], bool], timeout: float = 15) -> Stats:
    end = time.monotonic() + timeout
    while not wanted(stats := await llm.stats()):
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.005)
    return stats


async def idle(llm: AsyncLLM) -> Stats:
    return await until(llm, lambda s: (s.num_running, s.num_waiting, s.num_free_blocks) == (0, 0, s.num_usable_blocks))


def without_id(output: RequestOutput) -> RequestOutput:
    return replace(output, request_id="")


def test_many_at_once_give_the_tokens_of_llm(llm: AsyncLLM, offline: LLM) -> None:
    prompts = [[(7 * i + 3 * j) % 199 for j in range(2 + 5 * i)] for i in range(17)]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    expected = [output.outputs[0] for output in offline.generate(prompts, params)]
    gaps = [
        best - second
        for one in expected
        for at in one.logprobs or ()
        for best, second in [sorted((s.logprob for s in at.values()), reverse=True)[:2]]
    ]
    assert min(gaps) > 1e-4, "rounding may decide: choose other prompts"

    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, prompt, params) for prompt in prompts))

    for outputs, one in zip(run(all_at_once()), expected, strict=True):
        got = outputs[-1].outputs[0]
        assert got.token_ids == one.token_ids
        assert got.finish_reason == "length"
        assert got.text == one.text
        assert got.text.split() == [f"w{token}" for token in one.token_ids]
        assert got.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-3)


def test_every_field_of_an_output_is_that_of_llm(llm: AsyncLLM, offline: LLM) -> None:
    params = SamplingParams(0.8, seed=3, n=3, max_tokens=9, logprobs=3, prompt_logprobs=1, stop_token_ids=[17])
    offline.reset_prefix_cache()
    (expected,) = offline.generate("w5 w6 w7", params)

    async def ask() -> RequestOutput:
        await llm.reset_prefix_cache()
        return (await collect(llm, "w5 w6 w7", params))[-1]

    got = run(ask())
    assert (got.prompt, got.prompt_token_ids) == ("w5 w6 w7", [5, 6, 7])
    for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
        assert (mine.text, mine.token_ids, mine.finish_reason) == (theirs.text, theirs.token_ids, theirs.finish_reason)
        assert [list(at) for at in mine.logprobs or ()] == [list(at) for at in theirs.logprobs or ()]
    assert [at and {t: s.rank for t, s in at.items()} for at in got.prompt_logprobs or ()] == [
        at and {t: s.rank for t, s in at.items()} for at in expected.prompt_logprobs or ()
    ]
    assert len(got.prompt_logprobs or ()) == 3


def test_streams_add_up_and_what_was_yielded_stays_as_it_is(llm: AsyncLLM) -> None:
    async def three() -> list[list[RequestOutput]]:
        kinds = (RequestOutputKind.CUMULATIVE, DELTA, FINAL)
        return await asyncio.gather(*(collect(llm, PROMPT, GREEDY, output_kind=kind) for kind in kinds))

    cumulative, deltas, final = run(three())
    whole = final[-1].outputs[0]
    assert len(final) == 1
    assert len(whole.token_ids) == 12
    assert [token for one in deltas for token in one.outputs[0].token_ids] == whole.token_ids
    assert "".join(one.outputs[0].text for one in deltas) == whole.text
    assert len(deltas) > 1
    lengths = [len(one.outputs[0].token_ids) for one in cumulative]
    assert lengths == sorted(set(lengths))
    assert all(one.outputs[0].token_ids == whole.token_ids[:n] for one, n in zip(cumulative, lengths))
    assert [one.finished for one in cumulative] == [False] * (len(cumulative) - 1) + [True]


def test_a_slow_reader_gets_everything(llm: AsyncLLM) -> None:
    async def slowly(kind: RequestOutputKind) -> list[RequestOutput]:
        found = []
        async for output in llm.generate(PROMPT, GREEDY, output_kind=kind):
            found.append(output)
            await idle(llm)
        return found

    cumulative, deltas = run(slowly(RequestOutputKind.CUMULATIVE)), run(slowly(DELTA))
    assert len(cumulative) == 2
    assert len(deltas) == 12
    assert [token for one in deltas for token in one.outputs[0].token_ids] == cumulative[-1].outputs[0].token_ids


def test_closing_early_ends_the_request(llm: AsyncLLM) -> None:
    async def leave() -> None:
        stream = llm.generate(PROMPT, replace(LONG, n=2), "early")
        await anext(stream)
        assert (await llm.stats()).num_running == 2
        await stream.aclose()
        assert (await llm.stats()).num_running == 0
        # The id is free at once, and the late results of its first owner are not taken for the second's.
        assert await collect(llm, PROMPT, GREEDY, "early")
        async for _ in llm.chat([{"role": "user", "content": "w1 w2"}], LONG):
            break
        await idle(llm)

    run(leave())


def test_cancelling_a_task_ends_its_request_and_no_other(llm: AsyncLLM, offline: LLM) -> None:
    (expected,) = offline.generate(PROMPT, LONG)

    async def cancel() -> list[int]:
        other = asyncio.create_task(tokens(llm, params=LONG))
        tasks = [asyncio.create_task(tokens(llm, [i, 1, 2], LONG)) for i in range(5)]
        await until(llm, lambda s: s.num_running == 6)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        assert (await llm.stats()).num_running <= 1
        return await other

    assert run(cancel()) == expected.outputs[0].token_ids


def test_an_event_loop_that_ends_takes_its_requests_along(llm: AsyncLLM) -> None:
    async def start_only() -> None:
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        kept.append(stream)

    kept: list[Any] = []
    run(start_only())
    assert run(tokens(llm))


def test_abort_ends_with_what_there_is(llm: AsyncLLM) -> None:
    async def abort() -> RequestOutput:
        await llm.abort("unknown")
        outputs = []
        async for output in llm.generate(PROMPT, LONG, "mine"):
            outputs.append(output)
            await llm.abort("mine")
        return outputs[-1]

    (completion,) = run(abort()).outputs
    assert completion.finish_reason == "abort"
    assert 1 <= len(completion.token_ids) < 300


def test_a_stop_string_ends_the_request_in_the_engine(llm: AsyncLLM, offline: LLM) -> None:
    (expected,) = offline.generate(PROMPT, LONG)
    words = expected.outputs[0].text.split()
    params = replace(LONG, stop=(f" {words[3]} ",))

    async def stop() -> RequestOutput:
        output = (await collect(llm, PROMPT, params))[-1]
        assert (await llm.stats()).num_running == 0
        return output

    (completion,) = run(stop()).outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", params.stop[0])
    assert completion.text == expected.outputs[0].text.partition(params.stop[0])[0]


def test_chat_goes_through_the_template(llm: AsyncLLM, offline: LLM) -> None:
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    other = {"chat_template": "{{ messages[1].content }} {{ word }}", "chat_template_kwargs": {"word": "w9"}}

    async def chat(**options: Any) -> list[RequestOutput]:
        with pytest.raises(RequestError, match="conversation is empty"):
            await anext(llm.chat([]))
        with pytest.raises(RequestError, match="knows no 'word'"):
            await anext(llm.chat(turns, word="w9"))
        return [output async for output in llm.chat(turns, GREEDY, output_kind=FINAL, **options)]

    (output,) = run(chat())
    assert output.prompt_token_ids == [1, 2, 3]
    assert run(chat(**other))[0].prompt_token_ids == [3, 9]
    assert offline.chat(turns, GREEDY, **other)[0].prompt_token_ids == [3, 9]
    assert [o.prompt_token_ids for o in offline.chat([turns, turns[:1]], GREEDY)] == [[1, 2, 3], [1, 2]]
    for wrong in ("hi", [], ["hi"], [[]], turns[0], [turns, turns[0]]):
        with pytest.raises(RequestError, match=r"conversation is|message is"):
            offline.chat(wrong)  # type: ignore[arg-type]
    assert output.finished


def test_defaults_are_the_models(llm: AsyncLLM, offline: LLM) -> None:
    assert llm.default_sampling_params(max_tokens=3) == offline.default_sampling_params(max_tokens=3)
    assert llm.default_sampling_params() == SamplingParams(0.5, top_k=7)
    assert llm.info == offline.engine.inputs.info
    (output,) = run(collect(llm, PROMPT, output_kind=FINAL))
    assert len(output.outputs[0].token_ids) == 16


def test_prefixes_are_reused_until_they_are_forgotten(llm: AsyncLLM) -> None:
    async def cached() -> list[int]:
        found = []
        for forget in (True, False, True):
            if forget:
                await llm.reset_prefix_cache()
            found.append((await collect(llm, PROMPT, GREEDY))[-1].num_cached_tokens)
        return found

    assert run(cached()) == [0, 32, 0]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([199], GREEDY, "token id 199 is outside the vocabulary"),
        ([1] * 512, GREEDY, "max_model_len=512"),
        ([1], SamplingParams(allowed_token_ids=[500]), "allowed_token_ids holds 500"),
        ([1], {"temperature": 0}, "must be SamplingParams, got dict"),
        (b"text", GREEDY, "must be text or a list of token ids, got bytes"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_works(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams, message: str
) -> None:
    async def ask() -> None:
        with pytest.raises(RequestError, match=message):
            await collect(llm, prompt, params)
        assert await tokens(llm)

    run(ask())


def test_what_no_message_can_hold_is_refused(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rapid_infer.async_llm.frame", lambda payload: frame(payload, 10))
        with pytest.raises(RequestError, match=r"cannot be sent to the engine: a message of .* bytes is larger"):
            run(collect(llm, PROMPT, GREEDY))
    assert run(tokens(llm))


def test_an_id_in_use_is_refused(llm: AsyncLLM) -> None:
    async def twice() -> None:
        async with contextlib.aclosing(llm.generate(PROMPT, LONG, "one")) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="'one' is in use"):
                await collect(llm, PROMPT, GREEDY, "one")
            assert await tokens(llm)

    run(twice())


def test_what_only_the_engine_refuses_harms_nobody_else(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.inputs, "info", replace(llm.info, vocab_size=1000))

    async def ask() -> None:
        good = asyncio.create_task(tokens(llm, params=LONG))
        with pytest.raises(RequestError, match="token id 500 is outside the vocabulary"):
            await collect(llm, [1, 500], replace(GREEDY, n=3))
        llm._tell(AddRequest("odd", b"\1\0\0\0", {"temperature": -1.0}, (), 20, 0, 0, None))
        assert len(await good) == 300

    run(ask())


def test_another_thread_is_refused_while_the_event_loop_runs(llm: AsyncLLM) -> None:
    async def outer() -> None:
        assert await tokens(llm)
        stream = llm.generate(PROMPT, LONG, "long")
        await anext(stream)
        for call in (tokens(llm), llm.stats(), llm.abort("long"), llm.reset_prefix_cache()):
            with pytest.raises(RequestError, match="in use by another event loop, which runs in another thread"):
                await asyncio.to_thread(run, call)
        with pytest.raises(RequestError, match="call it there"):
            await asyncio.to_thread(llm.shutdown)
        await stream.aclose()

    run(outer())
    # That loop has ended.
    assert in_thread(lambda: run(tokens(llm)))


def in_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(20)


def test_a_forked_process_is_told_to_spawn_and_leaves_the_engine_to_its_parent(llm: AsyncLLM) -> None:
    async def outer() -> None:
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        reader, writer = os.pipe()
        if not (child := os.fork()):
            signal.alarm(20)
            answers = []
            for call in (tokens(llm), llm.stats(), llm.abort("a"), llm.reset_prefix_cache()):
                try:
                    call.send(None)
                except BaseException as error:
                    answers.append(f"{type(error).__name__}: {error}")
            with contextlib.suppress(StopIteration):
                stream.aclose().send(None)
            llm.shutdown()
            os.write(writer, "\n".join(answers).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answers = (await asyncio.to_thread(pipe.read)).decode().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        assert len(answers) == 4
        for answer in answers:
            assert answer.startswith("EngineDeadError")
            assert "get_context('spawn')" in answer
        *_, last = [output async for output in stream]
        assert last.outputs[0].finish_reason == "length"

    run(outer())


def test_an_interrupt_from_the_terminal_leaves_the_engine_alone(llm: AsyncLLM) -> None:
    os.kill(llm._process.process.pid, signal.SIGINT)
    assert run(tokens(llm))
    assert llm.is_running
    assert llm.dead_error is None


def test_startup_fails_with_the_errors_of_llm(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown argument 'max_num_seq': did you mean 'max_num_seqs'"):
        AsyncLLM(path, max_num_seq=4)
    with pytest.raises(HubError, match="does not exist"):
        AsyncLLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="seed must be an integer from"):
        AsyncLLM(path, **{**TOKENS_ONLY, "seed": 2**64})


def test_startup_fails_with_what_the_engine_process_raised(path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(path) / "config.json").read_text())
    with pytest.raises(WeightError) as offline_error:
        LLM(str(tmp_path), **TOKENS_ONLY)
    with pytest.raises(WeightError) as error:
        AsyncLLM(str(tmp_path), **TOKENS_ONLY)
    assert str(error.value) == str(offline_error.value)


def test_a_killed_engine_ends_every_call_at_once_and_later_ones_too(path: str) -> None:
    llm = AsyncLLM(path, **TOKENS_ONLY)

    async def lose() -> None:
        tasks = [asyncio.create_task(tokens(llm, [i, 1, 2], LONG)) for i in range(20)]
        await until(llm, lambda s: s.num_running == 20)
        os.kill(llm._process.process.pid, signal.SIGKILL)
        for result in await asyncio.gather(*tasks, llm.stats(), return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "killed by SIGKILL" in str(result)

    run(lose())
    assert not llm.is_running
    for later in (tokens(llm), llm.stats(), llm.reset_prefix_cache()):
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            run(later)
    llm.shutdown()
    llm.shutdown()
    assert "SIGKILL" in str(llm.dead_error)


def test_an_engine_that_died_between_two_event_loops_says_why(path: str) -> None:
    llm = AsyncLLM(path, **TOKENS_ONLY)
    assert run(tokens(llm))
    llm._channel.send(frame(b"garbage"))
    assert llm._process.process.wait(10) == 1
    assert not llm.is_running
    with pytest.raises(EngineDeadError, match="ValidationError"):
        run(tokens(llm))


def test_an_object_nobody_holds_ends_its_process_by_force_if_need_be(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapid_infer.async_llm.GRACE", 0.2)

    async def use() -> subprocess.Popen[bytes]:
        llm = AsyncLLM(path, **TOKENS_ONLY)
        assert await tokens(llm)
        process = llm._process.process
        os.kill(process.pid, signal.SIGSTOP)
        del llm
        gc.collect()
        return process

    assert run(use()).returncode == -signal.SIGKILL


SCRIPT = """
import sys, time
from rapid_infer import AsyncLLM
llm = AsyncLLM(sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True)
print(llm._process.process.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["wait", "leave"])
def test_the_engine_does_not_outlive_its_front(path: str, ending: str) -> None:
    front = subprocess.Popen([sys.executable, "-c", SCRIPT, path, ending], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    if ending == "wait":
        assert is_alive(pid)
        front.kill()
    assert front.wait(10) == (-signal.SIGKILL if ending == "wait" else 0)
    front.stdout.close()
    end = time.monotonic() + (15 if ending == "wait" else 0)
    while is_alive(pid):
        assert time.monotonic() < end, "the engine is still there"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie, whom nobody may collect in a container, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_shutdown_ends_calls_in_progress_and_can_be_repeated(engine: AsyncLLM) -> None:
    """The last test: it ends the engine that the others share."""

    async def leave() -> None:
        async with engine:
            task = asyncio.create_task(tokens(engine, params=LONG))
            await until(engine, lambda s: s.num_running == 1)
        with pytest.raises(EngineDeadError, match="was shut down"):
            await task

    run(leave())
    assert engine._process.process.returncode == 0
    engine.shutdown()
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match="was shut down"):
        run(tokens(engine))
