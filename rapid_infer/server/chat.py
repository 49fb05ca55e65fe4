"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import Any

from rapid_infer.outputs import CompletionOutput, RequestOutput
from rapid_infer.server import conversation, events
from rapid_infer.server.answers import Answer, failed
from rapid_infer.server.chat_form import ChatForm, make_form
from rapid_infer.server.errors import invalid
from rapid_infer.server.http import Exchange
from rapid_infer.server.parsers import Arguments, Call, Content, Delta, Reasoning, merged
from rapid_infer.server.sampling import check_model, check_top_logprobs, sampling_params
from rapid_infer.server.schema import ChatRequest
from rapid_infer.server.served import Served

_PLAIN_END = b'},"logprobs":null,"finish_reason":null}'


class _Choice:
    """One completion: its parsers, and what they have given."""

    def __init__(self, index: int, form: ChatForm, top_logprobs: int | None) -> None:
        self.index = index
        self._think, self._tools = form.parsers()
        self._with_reasoning, self._count = form.with_reasoning, top_logprobs
        # Not from the request's id, which a client may give twice: ids must differ within a conversation.
        self._call_ids = uuid.uuid4().hex[:16] if self._tools is not None else ""
        self.num_calls = 0
        self._begun = False
        self._head = b'{"index":%d,"delta":{"content":' % index

    def parse(self, text: str, final: bool) -> list[Delta]:
        """What is new."""
        if self._think is None and self._tools is None:
            return [Content(text)] if text else []
        deltas: list[Delta] = [Content(text)] if self._think is None else self._think.push(text)
        if final and self._think is not None:
            deltas += self._think.finish()
        if self._tools is not None:
            passed, deltas = deltas, []
            for one in passed:
                deltas.extend(self._tools.push(one.text) if isinstance(one, Content) else [one])
            if final:
                deltas += self._tools.finish()
        kept = [one for one in merged(deltas) if self._with_reasoning or not isinstance(one, Reasoning)]
        self.num_calls += sum(isinstance(one, Call) for one in kept)
        return kept

    def finish_reason(self, one: CompletionOutput) -> str | None:
        return "tool_calls" if one.finish_reason == "stop" and self.num_calls else one.finish_reason

    def call_id(self, index: int) -> str:
        return f"call_{self._call_ids}{index}"

    def whole(self, one: CompletionOutput) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        texts = {Content: "", Reasoning: ""}
        calls: list[dict[str, Any]] = []
        for delta in self.parse(one.text, final=True):
            if isinstance(delta, Call):
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": self.call_id(delta.index), "type": "function", "function": function})
            elif isinstance(delta, Arguments):
                calls[delta.index]["function"]["arguments"] += delta.text
            else:
                texts[type(delta)] += delta.text
        content = texts[Content]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        if texts[Reasoning]:
            message["reasoning_content"] = texts[Reasoning]
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(one),
            "finish_reason": self.finish_reason(one),
            "stop_reason": one.stop_reason,
        }

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        return None if self._count is None else events.chat_logprobs(one.logprobs, self._count)

    def pieces(self, one: CompletionOutput) -> list[bytes]:
        """The choices of the next events."""
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            out.append(self._piece({"role": "assistant", "content": ""}))
        deltas = self.parse(one.text, one.finished)
        logprobs = self._logprobs(one) if one.logprobs else None
        if logprobs is None:
            out += [self._delta(delta) for delta in deltas]
        else:
            # All tokens of this piece belong to its first event.
            shown = [self._as_dict(delta) for delta in deltas] or [{}]
            out += [self._piece(delta, None if at else logprobs) for at, delta in enumerate(shown)]
        if one.finished:
            out.append(self._piece({}, None, self.finish_reason(one), one.stop_reason))
        return out

    def _delta(self, delta: Delta) -> bytes:
        if isinstance(delta, Content):
            return self._head + events.encode(delta.text) + _PLAIN_END
        return self._piece(self._as_dict(delta))

    def _as_dict(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, Call):
            function = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": self.call_id(delta.index), "type": "function", "function": function}
        else:
            call = {"index": delta.index, "function": {"arguments": delta.text}}
        return {"tool_calls": [call]}

    def _piece(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        made = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            made["stop_reason"] = stop_reason
        return events.encode(made)


async def chat_completions(served: Served, exchange: Exchange) -> None:
    body = await exchange.json(ChatRequest, served.settings.max_body)
    check_model(served, body.model)
    check_top_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if body.modalities not in (None, [], ["text"]):
        raise invalid("modalities", f'modalities must be ["text"], got {body.modalities!r:.80}')
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    params = sampling_params(served, body, **more)
    messages = conversation.plain_messages(body.messages)
    served.admit(params.n)
    form = await make_form(served, body, messages, params)
    exchange.watch()
    if served.settings.log_prompts:
        exchange.notes["prompt"] = form.text
    answer = Answer(served, exchange, body, "chatcmpl-", "chat.completion", "chat.completion.chunk")
    count = (body.top_logprobs or 0) if body.logprobs else None
    choices = [_Choice(at, form, count) for at in range(params.n)]
    if body.stream:
        await _stream(answer, form, choices)
    else:
        output = await answer.finish(form.ids, form.params, "messages")
        await answer.respond([choices[one.index].whole(_checked(one)) for one in output.outputs])


async def _stream(answer: Answer, form: ChatForm, choices: list[_Choice]) -> None:
    def take(output: RequestOutput, one: CompletionOutput) -> None:
        for piece in choices[one.index].pieces(_checked(one)):
            answer.put(piece)

    await answer.follow(form.ids, form.params, "messages", take)
    await answer.end_stream()


def _checked(one: CompletionOutput) -> CompletionOutput:
    if one.finish_reason == "error":
        raise failed(one.error)
    return one
