"""Tensors that older libraries saved although they follow from the config: rotary tables, causal masks, positions.

One list for all models. It is asked only about tensors that no parameter of the model wants, so it can never take a
weight away; and it asks for shape and type where a name alone could be a weight's.
"""

from __future__ import annotations

from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.index_map import is_scalar
from rapid_infer.quant.stored import KV_SCALES

ROTARY = frozenset({"inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "cos_sin_cache"})
MASKS = frozenset({"bias", "causal_mask"})
KV_SCALE = "no scale of a quantized KV cache as this one is kept"


def why_computed(info: TensorInfo) -> str | None:
    """Why no model needs `info`; None when it is not known to be computed."""
    *path, leaf = info.name.lower().split(".")
    parent = path[-1] if path else ""
    if leaf in ROTARY and "rotary" in parent:
        return "rotary table, computed from the config"
    if "attn" in parent or "attention" in parent:
        # A bias that is a weight has one dimension.
        square = len(info.shape) == 4 and info.shape[:2] == (1, 1) and info.shape[2] == info.shape[3]
        if (leaf in MASKS and square) or (leaf == "masked_bias" and is_scalar(info.shape)):
            return "causal mask, computed"
    if leaf in KV_SCALES and is_scalar(info.shape[1:]):
        return KV_SCALE
    if leaf == "position_ids" and not info.dtype.is_floating_point:
        return "positions, computed"
    return None
