"""scripts/quantize_checkpoint.py as a module."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location(
    "quantize_checkpoint", Path(__file__).resolve().parents[2] / "scripts" / "quantize_checkpoint.py"
)
assert _SPEC
script: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = script
assert _SPEC.loader
_SPEC.loader.exec_module(script)
