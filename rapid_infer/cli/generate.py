"""`rapid-infer generate`: complete prompts from the command line."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.errors import RequestError
from rapid_infer.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams

if TYPE_CHECKING:
    from rapid_infer.llm_engine import LLMEngine

MAX_TOKENS = 256


@dataclass
class Timing:
    """Seconds, and tokens generated over all prompts."""

    load: float
    first_token: float = 0.0
    total: float = 0.0
    tokens: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.total if self.total else 0.0

    def line(self) -> str:
        return (
            f"{self.tokens} tokens in {self.total:.2f} s ({self.rate:.1f} tok/s), "
            f"first token after {self.first_token:.2f} s; model loaded in {self.load:.1f} s"
        )


@options.expand(engine_args=options.RUN, sampling=options.SAMPLING)
def generate(
    *,
    model: options.Model = "demo",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat for several. Default: standard input.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file that holds a prompt; `-` is standard input.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", metavar="", help="Each line of -f, or of standard input, is a prompt of its own.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", metavar="", help="Put prompts through the chat template.")] = False,
    system: options.System = None,
    no_thinking: options.NoThinking = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most. Default: 256, or the model's own.")
    ] = None,
    sampling: dict[str, Any],
    as_json: options.AsJson = False,
    engine_args: dict[str, Any],
    offline: options.Offline = False,
) -> None:
    """Complete prompts. Example: rapid-infer generate -p "The capital of France is"

    A model that was trained to chat wants its chat template: rapid-infer generate MODEL --chat -p "Hello"

    Text goes to standard output as it is made; the closing line with tokens, speed and time to first token goes to
    standard error. Sampling options that are not given come from the model's generation_config.json.
    """
    options.go_offline(offline)
    logprobs, ids = sampling["logprobs"], read_ids(sampling["stop_token_ids"] or [])
    lists = {"stop": sampling["stop"] or None, "stop_token_ids": ids or None}
    given = options.sampling_options({"max_tokens": max_tokens, **sampling, **lists})
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs shows only in the JSON report; add --json")
    if (system is not None or no_thinking) and not chat:
        option = "--system" if system is not None else "--no-thinking"
        raise RequestError(f"{option} is for the chat template, which a plain prompt does not go through; add --chat")
    prompts = read_prompts(prompt or [], file or [], lines)
    start = time.perf_counter()
    from rapid_infer.llm_engine import LLMEngine

    engine = LLMEngine(model, **engine_args)
    timing = Timing(load=time.perf_counter() - start)
    options.show_memory(engine)
    params = options.sampling_params(engine, given, MAX_TOKENS)
    template = options.template_options(no_thinking)
    encoded = [_encode_chat(engine, text, system, template) if chat else engine.encode(text) for text in prompts]
    show = len(prompts) == 1 and sampling["n"] == 1 and not as_json
    outputs = _run(engine, encoded, params, timing, show)
    for output, text in zip(outputs, prompts):
        output.prompt = text
    if as_json:
        print(json.dumps(_report(outputs, timing, engine, logprobs), indent=2, ensure_ascii=False))
    elif not show:
        _print_all(outputs)
    if not as_json:
        print(timing.line(), file=sys.stderr)
    _raise_failures(outputs)


def read_ids(values: list[str]) -> list[int]:
    """Token ids as they are typed, one or several with commas."""
    try:
        return [int(part) for value in values for part in value.split(",")]
    except ValueError:
        raise RequestError(f"--stop-token-ids must be token ids such as 2 or 2,5, got {','.join(values)!r}") from None


def read_prompts(prompts: list[str], files: list[Path], lines: bool) -> list[str]:
    """All prompts, those of -p first. RequestError when there is none, or a file cannot be read."""
    if lines and prompts and not files:
        raise RequestError("--lines is for the lines of -f, and -p is one prompt whatever it holds; drop --lines")
    found = list(prompts)
    for file in files or ([] if prompts else [Path("-")]):
        text = _read(file)
        found += [line for line in text.split("\n") if line.strip()] if lines else [text]
    if not any(text.strip() for text in found):
        raise RequestError('no prompt: give one with -p "text", with -f FILE, or on standard input')
    return found


def _read(file: Path) -> str:
    """All of a file, without its last line end. Nothing but a line feed, or both characters of Windows, ends a line."""
    standard = str(file) == "-"
    if standard and sys.stdin.isatty():
        print("Type a prompt, then Ctrl-D:", file=sys.stderr)
    try:
        content = sys.stdin.buffer.read() if standard else file.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8; save it as UTF-8"
    name = "standard input" if standard else f"the prompt file {file}"
    raise RequestError(f"cannot read {name}: {reason}")


def _encode_chat(engine: LLMEngine, text: str, system: str | None, template: dict[str, Any]) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.inputs.encode_chat([*messages, {"role": "user", "content": text}], **template)


def _run(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, timing: Timing, show: bool
) -> list[RequestOutput]:
    whole = [RequestOutput(str(i), None, ids, []) for i, ids in enumerate(prompts)]
    start = time.perf_counter()
    for output in whole:
        engine.add_request(output.request_id, output.prompt_token_ids, params, output_kind=RequestOutputKind.DELTA)
    try:
        while engine.has_unfinished_requests():
            for delta in engine.step():
                if not timing.tokens:
                    timing.first_token = time.perf_counter() - start
                timing.tokens += _merge(whole[int(delta.request_id)], delta)
                if show:
                    print(delta.outputs[0].text, end="", flush=True)
    finally:
        if show:  # after an interrupt too
            print()
    timing.total = time.perf_counter() - start
    return whole


def _merge(whole: RequestOutput, delta: RequestOutput) -> int:
    """Add a delta to the output so far; returns its number of tokens."""
    tokens = sum(len(new.token_ids) for new in delta.outputs)
    whole.num_cached_tokens, whole.finished = delta.num_cached_tokens, delta.finished
    for new in delta.outputs:
        mine = next((one for one in whole.outputs if one.index == new.index), None)
        if mine is None:
            whole.outputs = sorted([*whole.outputs, new], key=lambda one: one.index)
            continue
        mine.text += new.text
        mine.token_ids += new.token_ids
        mine.finish_reason, mine.stop_reason, mine.error = new.finish_reason, new.stop_reason, new.error
        mine.cumulative_logprob = new.cumulative_logprob
        if mine.logprobs is not None and new.logprobs is not None:
            mine.logprobs += new.logprobs
    return tokens


def _print_all(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs, 1):
        for completion in output.outputs:
            label = f"{number}.{completion.index + 1}" if len(output.outputs) > 1 else str(number)
            print(f"[{label}] {output.prompt}")
            print(completion.text)
            print()


def _report(outputs: list[RequestOutput], timing: Timing, engine: LLMEngine, logprobs: int | None) -> dict[str, Any]:
    info = engine.core.info
    return {
        "model": str(engine.checkpoint.path),
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": engine.config.device,
        "results": [
            {
                "prompt": output.prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
                "outputs": [_completion(completion, logprobs) for completion in output.outputs],
            }
            for output in outputs
        ],
        "tokens": timing.tokens,
        "seconds": round(timing.total, 4),
        "tokens_per_second": round(timing.rate, 2),
        "time_to_first_token": round(timing.first_token, 4),
        "load_seconds": round(timing.load, 3),
    }


def _completion(completion: CompletionOutput, logprobs: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
    }
    if logprobs is not None:
        row["cumulative_logprob"] = completion.cumulative_logprob
        row["logprobs"] = [
            _logprob(token, scores) | {"top": _top(scores, logprobs)}
            for token, scores in zip(completion.token_ids, completion.logprobs or [])
        ]
    return row


def _logprob(token: int, scores: dict[int, Logprob]) -> dict[str, Any]:
    score = scores[token]
    return {"token_id": token, "token": score.decoded_token, "logprob": score.logprob, "rank": score.rank}


def _top(scores: dict[int, Logprob], count: int) -> list[dict[str, Any]]:
    """The `count` likeliest; the chosen token, which `scores` holds in any case, only if it is one of them."""
    likeliest = sorted((token for token in scores if scores[token].rank <= count), key=lambda token: scores[token].rank)
    return [_logprob(token, scores) for token in likeliest[:count]]


def _raise_failures(outputs: list[RequestOutput]) -> None:
    failed = [(o, c) for o in outputs for c in o.outputs if c.error]
    if failed:
        _, completion = failed[0]
        print(f"error: {len(failed)} completions failed; the first: {completion.error}", file=sys.stderr)
        raise typer.Exit(1)
