"""From the messages of a chat to its prompt: roles, parts, earlier calls, thinking, and what the template reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from rapid_infer.errors import RequestError
from rapid_infer.server.errors import ApiError, invalid
from rapid_infer.server.schema import ChatRequest, Message, Part, Tool, ToolCall
from rapid_infer.server.served import Served

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_NOT_KWARGS = (
    *("chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "messages", "conversation"),
    *("tools", "documents", "add_special_tokens", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer"),
)
"""Of the template or the tokenizer, and never a request's."""

THINKING = ("enable_thinking", "thinking")
"""What templates call their switch."""


@dataclass(frozen=True)
class Conversation:
    """A prompt, the text it was made of, and the begun answer that it ends with, if it is continued."""

    text: str
    ids: list[int]
    begun: str


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates expect them. ApiError that names the message and what is wrong with it."""
    if not messages:
        raise invalid("messages", "messages is empty; expected at least one message")
    return [_plain(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _plain(message: Message, place: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise invalid("messages", f"{place}.role must be one of {', '.join(ROLES)}, got {message.role!r:.80}")
    made: dict[str, Any] = {"role": role, "content": _text(message.content, place)}
    if message.content is None and role != "assistant":
        raise invalid("messages", f"{place}.content is missing; only an assistant's may be null")
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if (thought := message.reasoning_content or message.reasoning) is not None:
        made["reasoning_content"] = thought
    if message.tool_calls:
        if role != "assistant":
            raise invalid("messages", f"{place}.tool_calls: only an assistant's message has calls")
        made["tool_calls"] = [_call(one, f"{place}.tool_calls[{at}]") for at, one in enumerate(message.tool_calls)]
    return made


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(
                "messages",
                f"{place}.content[{at}] is a part of type {part.type!r:.80}, and this model reads text alone; "
                "send parts of type text",
            )
        if text is None:
            raise invalid("messages", f"{place}.content[{at}].text is missing")
        texts.append(text)
    return "\n".join(texts)


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid("messages", f"{place}.function.arguments is not valid JSON: {error}") from None
    function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, in which arguments of calls are JSON texts."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**one, "tool_calls": list(map(changed, one["tool_calls"]))} if "tool_calls" in one else one for one in messages
    ]


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """ApiError for a tool that is no function, or one that is there twice."""
    names: set[str] = set()
    for at, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise invalid("tools", f"tools[{at}].type must be function, got {tool.type!r:.80}")
        if not tool.function.name or tool.function.name in names:
            raise invalid("tools", f"tools[{at}].function.name must be new, got {tool.function.name!r:.80}")
        names.add(tool.function.name)
    return [{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in tools or ()]


def thinking(body: ChatRequest, with_tools: bool) -> bool | None:
    """Whether the model shall think, None for the template's own default. The first that says so decides:
    chat_template_kwargs, enable_thinking, thinking, reasoning_effort, tools, which switch it off.
    """
    for name in THINKING:
        value = (body.chat_template_kwargs or {}).get(name)
        if value is not None:
            return bool(value)
    if body.enable_thinking is not None:
        return body.enable_thinking
    if body.thinking is not None:
        kinds = {"enabled": True, "disabled": False, "auto": None}
        if body.thinking.type not in kinds:
            raise invalid(
                "thinking", f"thinking.type must be enabled, disabled or auto, got {body.thinking.type!r:.80}"
            )
        return kinds[body.thinking.type]
    if body.reasoning_effort is not None:
        return body.reasoning_effort != "none"
    return False if with_tools else None


def template_values(body: ChatRequest, names: frozenset[str], with_tools: bool) -> dict[str, Any]:
    """What the template is given of a request, beside messages and tools: nothing that it does not read."""
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in _NOT_KWARGS:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs.{name} cannot be given by a request")
    values = {name: value for name, value in given.items() if name in names}
    wanted = thinking(body, with_tools)
    if wanted is not None:
        values |= {name: wanted for name in THINKING if name in names}
    if body.reasoning_effort is not None and "reasoning_effort" in names:
        values.setdefault("reasoning_effort", body.reasoning_effort)
    return values


async def encode(
    served: Served,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    values: dict[str, Any],
    *,
    continued: bool,
    add_generation_prompt: bool | None = None,
) -> Conversation:
    """ApiError for what the template refuses, and where there is none."""
    tokenizer = served.llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the server has no tokenizer, which a conversation needs", param="messages")
    if tools and "tools" in tokenizer.template_names():
        values = {**values, "tools": tools}
    if continued and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message is no assistant's: nothing to go on with")

    def render(messages: list[dict[str, Any]]) -> str:
        return tokenizer.render_chat(
            messages,
            chat_template_kwargs=values,
            continue_final_message=continued,
            add_generation_prompt=False if continued else add_generation_prompt,
        )

    def work() -> Conversation:
        try:
            text = render(messages)
        except RequestError as error:
            # Some templates, DeepSeek's among them, put the arguments of a call into the text as they are.
            try:
                text = render(_with_text_arguments(messages))
            except RequestError:
                raise error from None
        return Conversation(text, tokenizer.encode_rendered(text), messages[-1]["content"] if continued else "")

    size = sum(len(message["content"]) + 64 for message in messages) + 256 * len(tools)
    try:
        return await served.off_loop(size, work)
    except RequestError as error:
        raise invalid("messages", str(error)) from None
