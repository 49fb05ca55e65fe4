"""What a model is: the contract of a plugin class. No concrete model, and no torch: importing this loads neither."""

from rapid_infer.models.causal_lm import CausalLM
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.models.config_reader import ConfigReader
from rapid_infer.registry import ModelRegistry

__all__ = ["CausalLM", "Checkpoint", "ConfigReader", "ModelRegistry", "read_checkpoint"]
