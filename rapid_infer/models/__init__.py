"""What a model is: the contract of a plugin class. No concrete model, and no torch: importing this loads neither."""

# ruff: noqa: F401
# The imports are the list of what there is.
from rapid_infer.models.causal_lm import CausalLM
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.models.config_reader import ConfigReader
from rapid_infer.registry import ModelRegistry
