"""How a chat is put and how its answer is read: the prompt, the grammar that limits it, and the parsers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rapid_infer.params import SamplingParams
from rapid_infer.server import conversation
from rapid_infer.server.errors import invalid
from rapid_infer.server.parsers import ThinkParser, ToolParser
from rapid_infer.server.parsers.json_calls import HermesParser
from rapid_infer.server.parsers.think import Begin
from rapid_infer.server.schema import ChatRequest, NamedTool
from rapid_infer.server.served import Served


@dataclass(frozen=True)
class ChatForm:
    """`reasoning` and `tools` are classes of parsers, None where nothing is to be parsed."""

    text: str
    ids: list[int]
    params: SamplingParams
    reasoning: type[ThinkParser] | None
    begin: Begin
    tools: type[ToolParser] | None
    functions: list[dict[str, Any]]
    with_reasoning: bool

    def parsers(self) -> tuple[ThinkParser | None, ToolParser | None]:
        """New ones, for one completion."""
        think = self.reasoning(self.begin) if self.reasoning is not None else None
        return think, self.tools(self.functions) if self.tools is not None else None


async def make_form(
    served: Served, body: ChatRequest, messages: list[dict[str, Any]], params: SamplingParams
) -> ChatForm:
    """ApiError for what contradicts itself, or the template refuses."""
    functions, forced = _tools(body)
    names = served.template_names()
    values = conversation.template_values(body, names, bool(functions))
    continued = bool(body.continue_final_message or body.messages[-1].prefix)
    if continued and body.add_generation_prompt:
        raise invalid(
            "add_generation_prompt", "add_generation_prompt begins a new answer; the last message is continued"
        )
    prompt = await conversation.encode(
        served, messages, functions, values, continued=continued, add_generation_prompt=body.add_generation_prompt
    )
    reasoning = served.reasoning_parser
    begin = reasoning.begins(prompt.text, prompt.begun) if reasoning is not None else Begin.AFTER
    if begin is Begin.UNKNOWN and any(values.get(name) is False for name in conversation.THINKING):
        begin = Begin.AFTER
    tools: type[ToolParser] | None = served.tool_parser if functions else None
    if forced:
        if params.structured_outputs is not None:
            raise invalid("tool_choice", "tool_choice forces a call, and response_format or a guide another form")
        tools = tools or HermesParser
        parallel = body.parallel_tool_calls is not False and len(forced) == len(functions)
        params = replace(params, structured_outputs={"grammar": tools.grammar(forced, parallel, served.literal)})
    if params.structured_outputs is not None and reasoning is not None and begin is not Begin.AFTER:
        params = replace(
            params, structured_outputs={**params.structured_outputs, **_thinking(served, reasoning, begin)}
        )
    tags = (tools.tags() if tools is not None else ()) + ((reasoning.start, reasoning.end) if reasoning else ())
    if any(tag in served.special_tokens for tag in tags):
        params = replace(params, skip_special_tokens=False)
    return ChatForm(
        prompt.text,
        prompt.ids,
        params,
        reasoning,
        begin,
        tools,
        functions,
        body.include_reasoning is not False,
    )


def _tools(body: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools that the model is shown, and the functions of which it must call one."""
    tools = conversation.plain_tools(body.tools)
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return tools, []
    if choice == "none":
        return [], []
    if isinstance(choice, str) and choice != "required":
        raise invalid("tool_choice", f"tool_choice must be auto, none, required or a function, got {choice!r:.80}")
    if not tools:
        raise invalid("tool_choice", "tool_choice asks for a call, and tools is empty")
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one["name"] == choice.function.name]
        if not functions:
            known = ", ".join(tool["function"]["name"] for tool in tools)
            raise invalid("tool_choice", f"tool_choice names {choice.function.name!r:.80}; tools has {known}")
    return tools, functions


def _thinking(served: Served, reasoning: type[ThinkParser], begin: Begin) -> dict[str, Any]:
    """The grammar holds after the thinking; where the model decides, it may think or not."""
    ids = served.tag_ids
    spec: dict[str, Any] = {"after": ids(reasoning.end)}
    if begin is Begin.UNKNOWN:
        spec["opens"] = ids(reasoning.start)
    return spec
