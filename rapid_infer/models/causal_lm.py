"""The contract between the runtime and a model class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rapid_infer.layers.batch import ForwardBatch
    from rapid_infer.layers.context import BuildContext
    from rapid_infer.layers.embedding import LMHead
    from rapid_infer.loader.weight_map import WeightMap


class CausalLM(Protocol):
    """An `nn.Module` that turns a step's tokens into hidden states. `worker/contract.py` checks that it is one.

    Two fields are read from the config that `read_config` returns: `vocab_size`, and `max_position_embeddings`, the
    longest sequence: what config.json says, lengthened by RoPE scaling (`RopeConfig.context_length`).
    """

    weight_map: WeightMap
    """From checkpoint names to module paths."""

    head: LMHead
    """Makes logits of hidden states; the model itself computes none."""

    @staticmethod
    def read_config(hf_config: Any) -> Any:
        """A frozen dataclass with every field the model needs. ConfigError for one that is missing or unsupported."""
        ...

    def __init__(self, config: Any, ctx: BuildContext) -> None: ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[tokens, hidden]` after the final norm, in the model's dtype."""
        ...
