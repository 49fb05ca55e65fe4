"""Where model files come from: a model reference goes in, a local directory comes out.

This version knows local directories and the `demo` model. Nothing here imports torch.
"""

from rapid_infer.hub.cache import cache_dir, file_lock
from rapid_infer.hub.demo import resolve_demo
from rapid_infer.hub.resolve import ModelRef, resolve

__all__ = ["ModelRef", "cache_dir", "file_lock", "resolve", "resolve_demo"]
