"""The linear family. Column layers cut their output features over the ranks, row layers their input features.

Each layer owns the rule by which its parameters are cut; a quantization method says how they are stored and multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import MatrixLayout, Shard, cut, whole
from rapid_infer.layers.matrix import MatrixModule
from rapid_infer.parallel.partial_sum import PartialSum
from rapid_infer.quant.param_spec import OUT, ParamSpec


class Linear(MatrixModule):
    """`y = x W^T + b`, whole on every rank. x `[tokens, in]`, y `[tokens, out]`; W `[out, in]` in the checkpoint.

    Subclasses pass the output features as parts, or cut the input features (`cut_input`).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        out_features: int | Sequence[Shard],
        bias: bool = False,
        cut_input: bool = False,
    ) -> None:
        ins = cut(ctx, None, in_features, "input features") if cut_input else whole(None, in_features)
        outs = [whole(None, out_features)] if isinstance(out_features, int) else out_features
        quant = ctx.quant_method()
        specs = dict(quant.params(ctx.dtype))
        if bias:
            specs["bias"] = ParamSpec(ctx.dtype, (OUT,))
        super().__init__(ctx, MatrixLayout(tuple(outs), ins), specs, quant=quant)
        self.quant = quant
        if not bias:
            self.register_parameter("bias", None)
        self.quant.bind(self, ctx)

    def finalize_weights(self) -> None:
        self.quant.finalize(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.quant.apply(self, x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in={self.layout.ins.local}, out={self.layout.local_out}, parts={list(self.layout.parts)}"


class ColumnParallelLinear(Linear):
    """Output features cut over the ranks: y `[tokens, out / ranks]`."""

    def __init__(self, ctx: BuildContext, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(ctx, in_features, [cut(ctx, None, out_features)], bias)


class MergedColumnParallelLinear(Linear):
    """Several column layers with one input as one matrix; parts 0, 1, ... stand one after another in y."""

    def __init__(self, ctx: BuildContext, in_features: int, out_features: Sequence[int], bias: bool = False) -> None:
        parts = [cut(ctx, i, size) for i, size in enumerate(out_features)]
        super().__init__(ctx, in_features, parts, bias)


class QKVParallelLinear(Linear):
    """Query, key and value projections as one matrix, cut by heads; y is this rank's Q, then K, then V heads.

    With more ranks than KV heads, each rank holds one KV head, `rank // (ranks / kv_heads)`.
    """

    def __init__(
        self, ctx: BuildContext, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        tp = ctx.parallel
        heads = tp.split(num_heads, "num_attention_heads")
        if num_kv_heads % tp.tp_size and tp.tp_size % num_kv_heads:
            divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
            fits = [n for n in divisors if num_kv_heads % n == 0 or n % num_kv_heads == 0]
            raise ConfigError(
                f"num_key_value_heads={num_kv_heads} can neither be split over nor repeated on tensor_parallel_size="
                f"{tp.tp_size}; use one of {fits}"
            )
        kv_heads = max(num_kv_heads // tp.tp_size, 1)
        kv_start = tp.tp_rank * num_kv_heads // tp.tp_size
        q = Shard("q", num_heads * head_dim, heads * head_dim, tp.tp_rank * heads * head_dim)
        k, v = (Shard(n, num_kv_heads * head_dim, kv_heads * head_dim, kv_start * head_dim) for n in ("k", "v"))
        super().__init__(ctx, in_features, [q, k, v], bias)
        self.num_heads = heads
        self.num_kv_heads = kv_heads


class RowParallelLinear(Linear):
    """Input features cut over the ranks; the bias is added once, and the partial products are added over the ranks.

    `defer`: the sum is left to the norm that comes next, see `PartialSum`; on one rank there is nothing to leave.
    """

    def __init__(
        self, ctx: BuildContext, in_features: int, out_features: int, bias: bool = False, defer: bool = False
    ) -> None:
        super().__init__(ctx, in_features, out_features, bias, cut_input=True)
        self.defer = defer

    def forward(self, x: Tensor) -> Tensor | PartialSum:  # type: ignore[override]
        y = self.quant.apply(self, x)
        if self.bias is not None and self.parallel.tp_rank == 0:
            y = y + self.bias
        return self.parallel.finish_sum(y, self.defer, self.ctx_name)
