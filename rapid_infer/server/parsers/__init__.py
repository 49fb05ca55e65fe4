"""Parsers of what models write: thinking apart from the answer, and tool calls. Found by entry point, or built in."""

from rapid_infer.server.parsers.base import Arguments, Call, Content, Delta, Reasoning, ToolParser, merged
from rapid_infer.server.parsers.choose import REASONING_PARSERS, TOOL_PARSERS, choose_reasoning, choose_tools
from rapid_infer.server.parsers.think import ThinkParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Arguments",
    "Call",
    "Content",
    "Delta",
    "Reasoning",
    "ThinkParser",
    "ToolParser",
    "choose_reasoning",
    "choose_tools",
    "merged",
]
