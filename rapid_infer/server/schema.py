"""What requests may hold. Descriptions are the documentation: docs/serving.md and /openapi.json are made of them.

Types are checked here, ranges by `SamplingParams`; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


def _is(text: str) -> Meta:
    return Meta(description=text)


class StreamOptions(Struct):
    include_usage: Annotated[bool | None, _is("a last chunk with the usage")] = None
    continuous_usage_stats: Annotated[bool | None, _is("usage so far in every chunk")] = None


class JsonSchema(Struct):
    schema: Annotated[dict[str, Any] | None, _is("a JSON schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: Annotated[str, _is("text, json_object or json_schema")]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    json: Annotated[dict[str, Any] | str | None, _is("a JSON schema")] = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: Annotated[str | None, _is("refused: give json, regex or choice")] = None


class Sampling(Struct, kw_only=True):
    """What both kinds of completion have in common. None everywhere means: the default."""

    model: Annotated[str | None, _is("one of /v1/models; may be left out")] = None
    max_tokens: Annotated[int | None, _is("tokens to generate at most, in one completion")] = None
    temperature: Annotated[float | None, _is("0 is greedy; higher is more varied")] = None
    top_p: Annotated[float | None, _is("keep the likeliest tokens up to this probability, in (0, 1]")] = None
    top_k: Annotated[int | None, _is("keep the k likeliest tokens; 0 or -1: all")] = None
    min_p: Annotated[float | None, _is("keep tokens this likely, relative to the likeliest, in [0, 1]")] = None
    n: Annotated[int | None, _is("completions per prompt")] = None
    presence_penalty: Annotated[float | None, _is("in [-2, 2]; above 0, tokens of the text get less likely")] = None
    frequency_penalty: Annotated[float | None, _is("in [-2, 2]; the same, once per time a token was used")] = None
    repetition_penalty: Annotated[float | None, _is("above 1, tokens of prompt and text get less likely")] = None
    logit_bias: Annotated[dict[str, float] | None, _is("token id: number in [-100, 100], added to its logit")] = None
    seed: Annotated[int | None, _is("same seed, same tokens")] = None
    stop: Annotated[str | list[str] | None, _is("texts that end the completion")] = None
    stop_token_ids: Annotated[list[int] | None, _is("token ids that end it, besides the model's own")] = None
    min_tokens: Annotated[int | None, _is("nothing ends the completion before this many tokens")] = None
    ignore_eos: Annotated[bool | None, _is("go on past the model's own end token")] = None
    include_stop_str_in_output: Annotated[bool | None, _is("keep the stop text at the end")] = None
    skip_special_tokens: Annotated[bool | None, _is("leave special tokens out of the text; true")] = None
    allowed_token_ids: Annotated[list[int] | None, _is("nothing but these can be chosen")] = None
    stream: Annotated[bool | None, _is("answer in server-sent events, as the text is made")] = None
    stream_options: Annotated[StreamOptions | None, _is("include_usage, continuous_usage_stats")] = None
    response_format: Annotated[ResponseFormat | None, _is("text, json_object, or json_schema with its schema")] = None
    structured_outputs: Annotated[StructuredOutputs | None, _is("one of json, regex, choice, json_object")] = None
    guided_json: Annotated[dict[str, Any] | str | None, _is("the same as structured_outputs.json")] = None
    guided_regex: Annotated[str | None, _is("the same as structured_outputs.regex")] = None
    guided_choice: Annotated[list[str] | None, _is("the same as structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, _is("refused: give guided_json, guided_regex or guided_choice")] = None
    use_beam_search: Annotated[Any, _is("refused: there is no beam search")] = None
    prompt_logprobs: Annotated[int | None, _is("log-probabilities of the prompt's tokens, of this many others too")] = (
        None
    )
    user: Annotated[Any, _is("ignored")] = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]], _is("text, token ids, or a list of texts and lists of token ids")
    ]
    echo: Annotated[bool | None, _is("begin the text with the prompt; max_tokens may then be 0")] = None
    logprobs: Annotated[int | None, _is("log-probabilities of the chosen and of this many likeliest tokens")] = None
    best_of: Annotated[int | None, _is("refused unless it equals n")] = None
    suffix: Annotated[Any, _is("refused")] = None


class Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


class Message(Struct):
    role: Annotated[str, _is("system, developer, user, assistant or tool")]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: Annotated[bool | None, _is("of the last message, an assistant's: go on with it")] = None


class FunctionDefinition(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    function: FunctionDefinition
    type: str = "function"


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    function: NamedFunction
    type: str = "function"


class Thinking(Struct):
    type: Annotated[str, _is("enabled, disabled or auto")]


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], _is("the conversation")]
    max_completion_tokens: Annotated[int | None, _is("as max_tokens; the smaller of the two wins")] = None
    logprobs: Annotated[bool | None, _is("log-probabilities of the chosen tokens")] = None
    top_logprobs: Annotated[int | None, _is("and of this many likeliest ones; needs logprobs")] = None
    tools: Annotated[list[Tool] | None, _is("functions that the model may call")] = None
    tool_choice: Annotated[str | NamedTool | None, _is("auto, none, required, or one function by name")] = None
    parallel_tool_calls: Annotated[bool | None, _is("false: one call at most, where tool_choice forces one")] = None
    continue_final_message: Annotated[bool | None, _is("go on with the last message, an assistant's")] = None
    add_generation_prompt: Annotated[bool | None, _is("whether an assistant's turn is begun")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _is("names that the chat template reads")] = None
    enable_thinking: Annotated[bool | None, _is("whether the model thinks first")] = None
    thinking: Annotated[Thinking | None, _is("the same, as {type: enabled, disabled or auto}")] = None
    reasoning_effort: Annotated[str | None, _is("none: no thinking; anything else: thinking")] = None
    include_reasoning: Annotated[bool | None, _is("false leaves the thinking out of the answer")] = None
    functions: Annotated[Any, _is("refused: use tools")] = None
    function_call: Annotated[Any, _is("refused: use tool_choice")] = None
    chat_template: Annotated[Any, _is("refused: the template is the server's")] = None
    audio: Annotated[Any, _is("refused: text only")] = None
    modalities: Annotated[list[str] | None, _is('refused unless it is ["text"]')] = None
    metadata: Annotated[Any, _is("ignored")] = None
    store: Annotated[Any, _is("ignored")] = None
    service_tier: Annotated[Any, _is("ignored")] = None
    prediction: Annotated[Any, _is("ignored")] = None


class TokenizeRequest(Struct):
    prompt: Annotated[str | None, _is("a text")] = None
    messages: Annotated[list[Message] | None, _is("or a conversation")] = None
    model: str | None = None
    tools: list[Tool] | None = None
    add_special_tokens: Annotated[bool | None, _is("of a text: whether the tokenizer adds its own; true")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, _is("also each token's text")] = None


class DetokenizeRequest(Struct):
    tokens: list[int]
    model: str | None = None


class ProfileRequest(Struct):
    num_steps: Annotated[int | None, _is("stop by itself after this many steps of the engine")] = None
    profile_prefix: Annotated[str | None, _is("of the file's name")] = None
    output_dir: Annotated[str | None, _is("below the folder that the server was given")] = None
