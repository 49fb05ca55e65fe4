"""Which parsers a model gets: by name, or those that fit its chat template."""

from __future__ import annotations

from typing import Any

from rapid_infer.errors import ConfigError
from rapid_infer.registry import EntryPointTable

NONE, AUTO = "none", "auto"

TOOL_PARSERS = EntryPointTable("rapid_infer.tool_parsers", what="tool parser")
REASONING_PARSERS = EntryPointTable("rapid_infer.reasoning_parsers", what="reasoning parser")

_PACKAGE = "rapid_infer.server.parsers"
# In the order in which they are tried.
_TOOLS = {
    "hermes": f"{_PACKAGE}.json_calls:HermesParser",
    "qwen3_coder": f"{_PACKAGE}.qwen3_coder:Qwen3CoderParser",
    "deepseek": f"{_PACKAGE}.json_calls:DeepSeekParser",
}
_REASONING = {"think": f"{_PACKAGE}.think:ThinkParser"}

for _table, _built_in in ((TOOL_PARSERS, _TOOLS), (REASONING_PARSERS, _REASONING)):
    for _name, _target in _built_in.items():
        _table.register(_name, _target, override=True)


def choose_tools(name: str, template: str, of_model: str | None = None) -> Any:
    """A class like `ToolParser`, or None. `of_model` is what the model's plugin asks for. ConfigError, PluginError."""
    return _choose(TOOL_PARSERS, _TOOLS, name, template, of_model, "--tool-parser")


def choose_reasoning(name: str, template: str, of_model: str | None = None) -> Any:
    """A class like `ThinkParser`, or None."""
    return _choose(REASONING_PARSERS, _REASONING, name, template, of_model, "--reasoning-parser")


def _choose(
    table: EntryPointTable, built_in: dict[str, str], name: str, template: str, of_model: str | None, option: str
) -> Any:
    if name == AUTO and of_model is not None:
        name = of_model
    if name == NONE:
        return None
    if name != AUTO:
        if name not in table.names():
            raise ConfigError(f"{option} must be auto, none or one of {', '.join(table.names())}, got {name!r}")
        return table.load(table.lookup(name))
    others = [one for one in table.names() if one not in built_in]
    for candidate in (*others, *built_in):
        parser: Any = table.load(table.lookup(candidate))
        if parser.fits(template):
            return parser
    return None
