"""/v1/completions: prompts as text or token ids."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from rapid_infer.errors import RequestError
from rapid_infer.outputs import CompletionOutput, Logprob, RequestOutput
from rapid_infer.params import SamplingParams
from rapid_infer.server import events
from rapid_infer.server.answers import Answer, failed, run_all
from rapid_infer.server.errors import invalid, of_request_error
from rapid_infer.server.http import Exchange
from rapid_infer.server.sampling import PARAMS, check_model, check_top_logprobs, sampling_params
from rapid_infer.server.schema import CompletionRequest
from rapid_infer.server.served import Served

PromptItem = str | list[int]
Scores = list[dict[int, Logprob] | None]


@dataclass
class _Choice:
    """One completion. `hidden`: it was asked for 0 tokens, and gets one that nobody sees."""

    index: int
    hidden: bool
    count: int | None
    first_text: str = ""
    offset: int = 0

    def push(
        self, one: CompletionOutput, ahead: str = "", scored: list[dict[int, Logprob] | None] | None = None
    ) -> Any:
        """What is new, as OpenAI writes it: text `ahead` of it is an echo, whose log-probabilities are `scored`."""
        if one.finish_reason == "error":
            raise failed(one.error)
        text = ahead if self.hidden else ahead + one.text
        logprobs = None
        if self.count is not None:
            positions = [*(scored or ()), *(() if self.hidden else one.logprobs or ())]
            logprobs, self.offset = events.text_logprobs(positions, self.count, self.offset, self.first_text)
        finish = "length" if self.hidden and one.finish_reason else one.finish_reason
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None if self.hidden else one.stop_reason,
        }


@dataclass
class _Job:
    """One prompt of a request."""

    ids: list[int]
    text: str | None
    first_index: int


def _items(prompt: Any) -> list[PromptItem]:
    """Each prompt alone; ApiError for what is none."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "the prompt is empty: got an empty list, expected text or token ids")
    if all(isinstance(one, int) for one in prompt):
        return [prompt]
    for at, one in enumerate(prompt):
        if isinstance(one, int):
            raise invalid("prompt", f"prompt[{at}] is a number beside texts or lists; expected text or a list of ids")
        if not one:
            raise invalid("prompt", f"prompt[{at}] is empty; expected at least one token")
    return list(prompt)


async def completions(served: Served, exchange: Exchange) -> None:
    body = await exchange.json(CompletionRequest, served.settings.max_body)
    check_model(served, body.model)
    check_top_logprobs("logprobs", body.logprobs)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise invalid("best_of", f"best_of must equal n={n}, got {body.best_of}: all completions are given back")
    hidden = body.max_tokens == 0
    if hidden and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1, or 0 together with echo")
    more: dict[str, Any] = {"max_tokens": 1} if hidden else {}
    if body.logprobs is not None:
        more["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
    params = sampling_params(served, body, **more)
    items = _items(body.prompt)
    served.admit(len(items) * params.n)
    jobs = [await _encode(served, one, at * params.n) for at, one in enumerate(items)]
    exchange.watch()
    answer = Answer(served, exchange, body, "cmpl-", "text_completion", "text_completion")
    await (_stream if body.stream else _whole)(answer, body, params, jobs, hidden)


async def _encode(served: Served, item: PromptItem, first_index: int) -> _Job:
    if not isinstance(item, str):
        highest = served.info.vocab_size - 1
        for token in (min(item), max(item)):
            if not 0 <= token <= highest:
                raise invalid("prompt", f"prompt holds {token}, outside the vocabulary: expected 0 to {highest}")
        return _Job(item, None, first_index)
    try:
        ids = await served.off_loop(len(item), lambda: served.llm.inputs.encode(item))
    except RequestError as error:
        raise of_request_error(error, PARAMS, "prompt") from None
    return _Job(ids, item, first_index)


def _echo(answer: Answer, body: CompletionRequest, job: _Job) -> str:
    if not body.echo:
        return ""
    if job.text is not None:
        return job.text
    tokenizer = answer.served.llm.tokenizer
    return "" if tokenizer is None else tokenizer.decode(job.ids)


def _first_text(answer: Answer, job: _Job) -> str:
    tokenizer = answer.served.llm.tokenizer
    return "" if tokenizer is None or not job.ids else tokenizer.token_text(job.ids[0])


def _scored(body: CompletionRequest, output: RequestOutput, job: _Job) -> Scores | None:
    """Log-probabilities of an echo."""
    if not body.echo or body.logprobs is None or output.prompt_logprobs is None:
        return None
    return output.prompt_logprobs


async def _whole(
    answer: Answer, body: CompletionRequest, params: SamplingParams, jobs: list[_Job], hidden: bool
) -> None:
    outputs = await run_all(answer.finish(job.ids, params, "prompt") for job in jobs)
    choices = []
    for job, output in zip(jobs, outputs):
        for one in output.outputs:
            choice = _Choice(job.first_index + one.index, hidden, body.logprobs, _first_text(answer, job))
            made = choice.push(one, _echo(answer, body, job), _scored(body, output, job))
            if body.prompt_logprobs is not None:
                made["prompt_logprobs"] = events.prompt_logprobs(output.prompt_logprobs)
            choices.append(made)
    await answer.respond(choices, hidden)


async def _stream(
    answer: Answer, body: CompletionRequest, params: SamplingParams, jobs: list[_Job], hidden: bool
) -> None:
    def follow(job: _Job) -> Coroutine[Any, Any, None]:
        first = _first_text(answer, job)
        choices = [_Choice(job.first_index + at, hidden, body.logprobs, first) for at in range(params.n)]
        echo = _echo(answer, body, job)
        prompt_scores: Scores = []
        echoed: set[int] = set()

        def take(output: RequestOutput, one: CompletionOutput) -> None:
            ahead, scored = "", None
            if output.prompt_logprobs is not None:
                prompt_scores.extend(output.prompt_logprobs)
                output.prompt_logprobs = None
            if body.echo and one.index not in echoed:
                echoed.add(one.index)
                ahead, scored = echo, prompt_scores if body.logprobs is not None else None
            made = choices[one.index].push(one, ahead, scored)
            if made["text"] or made["finish_reason"] or made["logprobs"]:
                answer.put(events.encode(made))

        return answer.follow(job.ids, params, "prompt", take)

    await run_all(map(follow, jobs))
    await answer.end_stream(hidden)
