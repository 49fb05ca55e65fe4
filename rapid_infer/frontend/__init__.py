"""Between text and the engine: prompts become requests, steps become outputs. Knows no device and no model."""

from rapid_infer.frontend.inputs import EngineFacts, InputProcessor, Prompt
from rapid_infer.frontend.outputs import OutputProcessor

__all__ = ["EngineFacts", "InputProcessor", "OutputProcessor", "Prompt"]
