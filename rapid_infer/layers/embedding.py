"""Token embedding and language-model head, both cut by vocabulary rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import MatrixLayout, Shard, whole
from rapid_infer.layers.parameter import Part, Placement
from rapid_infer.ops.registry import BoundOp
from rapid_infer.quant.param_spec import ParamSpec


class VocabShard(nn.Module):
    """weight `[rows, hidden]`: this rank's vocabulary rows.

    The last shard of an uneven vocabulary is padded with zeros.
    """

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = ctx.parallel
        self.rows = -(-vocab_size // ctx.parallel.tp_size)
        if (ctx.parallel.tp_size - 1) * self.rows >= vocab_size:
            raise ConfigError(
                f"vocab_size={vocab_size} leaves a rank without rows with tensor_parallel_size="
                f"{ctx.parallel.tp_size}; use a smaller one"
            )
        self.start = ctx.parallel.tp_rank * self.rows
        self.stop = min(self.start + self.rows, vocab_size)
        mine = Shard(None, vocab_size, self.stop - self.start, self.start)
        self.layout, self.spec = MatrixLayout((mine,), whole(None, hidden_size)), ParamSpec(ctx.dtype)
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size, dtype=ctx.dtype), requires_grad=False)

    def parts(self, leaf: str) -> tuple[Part, ...]:
        return self.layout.parts

    def placement(self, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
        if leaf != "weight" or expert is not None:
            raise KeyError(leaf)
        return self.layout.placement(self.weight, self.spec, part)

    def finalize_weights(self) -> None:
        self.weight.data[self.stop - self.start :].zero_()


class VocabEmbedding(VocabShard):
    """`[tokens]` ids -> `[tokens, hidden]`."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, vocab_size, hidden_size)
        self._lookup = ctx.op("embedding")

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return self._lookup(input_ids, self.weight)
        mine = (input_ids >= self.start) & (input_ids < self.stop)
        local = self._lookup((input_ids - self.start).where(mine, 0), self.weight)
        return self.parallel.all_reduce(local * mine.unsqueeze(-1))


class LMHead(VocabShard):
    """From hidden states to vocabulary scores; models compute none themselves.

    `tied_to`: share the embedding's matrix. Scores are `scale * h W^T`, then `soft_cap * tanh(scores / soft_cap)`, in
    fp32.
    """

    def __init__(
        self,
        ctx: BuildContext,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabEmbedding | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        if tied_to is not None:
            nn.Module.__init__(self)
            self.vocab_size, self.parallel = tied_to.vocab_size, tied_to.parallel
            self.rows, self.start, self.stop = tied_to.rows, tied_to.start, tied_to.stop
            self.layout, self.spec, self.weight = tied_to.layout, tied_to.spec, tied_to.weight
        else:
            super().__init__(ctx, vocab_size, hidden_size)
        self.scale = scale
        self.soft_cap = soft_cap
        self._scores, self._best = ctx.op("lm_head"), ctx.op("lm_head_argmax")
        self._packed: dict[Callable[[Tensor], Tensor], Tensor] = {}

    def finalize_weights(self) -> None:
        super().finalize_weights()
        for prepare in (self._scores.prepare, self._best.prepare):
            if prepare is not None and prepare not in self._packed:
                # A second copy: an embedding that shares the matrix, and chosen rows, need it as it was.
                self._packed[prepare] = prepare(self.weight.data[: self.stop - self.start])

    @property
    def packed_bytes(self) -> int:
        """Bytes of the second copies that `finalize_weights` makes of the matrix."""
        copies = {op.prepare for op in (self._scores, self._best) if op.prepare is not None}
        return len(copies) * self.weight.nbytes

    def _operand(self, op: BoundOp) -> Tensor:
        packed = None if op.prepare is None else self._packed.get(op.prepare)
        return self.weight[: self.stop - self.start] if packed is None else packed

    def _finish(self, scores: Tensor) -> Tensor:
        if self.scale != 1.0:
            scores = scores * self.scale
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden `[n, hidden]` -> fp32 `[n, this shard's vocabulary]`, or `[n, len(rows)]` for chosen rows."""
        if rows is not None:
            return self._finish(F.linear(hidden, self.weight[rows]).float())
        return self._finish(self._scores(hidden, self._operand(self._scores)))

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[n, hidden]` -> (value fp32 `[n]`, vocabulary id int64 `[n]`) of the best token in this shard.

        The value is not finite where a score is NaN.
        """
        if self.scale <= 0:
            value, index = self.logits(hidden).max(dim=-1)
        else:
            best, index = self._best(hidden, self._operand(self._best))
            value = self._finish(best)
            if self.soft_cap is not None:
                # It turns infinity, which may stand for NaN, into a number.
                value = best.where(best.isinf(), value)
        return value, index + self.start if self.start else index
