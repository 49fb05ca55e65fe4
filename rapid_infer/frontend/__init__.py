"""Between text and the engine: prompts become requests, steps become outputs. Knows no device and no model."""

from rapid_infer.frontend.grammars import Grammars
from rapid_infer.frontend.inputs import EngineInfo, InputProcessor, Prompt
from rapid_infer.frontend.outputs import OutputProcessor

__all__ = ["EngineInfo", "Grammars", "InputProcessor", "OutputProcessor", "Prompt"]
