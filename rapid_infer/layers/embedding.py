"""Token embedding and language-model head, both cut by vocabulary rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import MatrixLayout, Shard, whole
from rapid_infer.layers.matrix import MatrixModule
from rapid_infer.quant.param_spec import ParamSpec
from rapid_infer.quant.plain import PlainHead


def vocab_layout(ctx: BuildContext, vocab_size: int, hidden_size: int) -> MatrixLayout:
    """Equal numbers of rows on all ranks but the last, which may have fewer."""
    rows = -(-vocab_size // ctx.parallel.tp_size)
    if (ctx.parallel.tp_size - 1) * rows >= vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} leaves a rank without rows with tensor_parallel_size="
            f"{ctx.parallel.tp_size}; use a smaller one"
        )
    start = ctx.parallel.tp_rank * rows
    mine = Shard(None, vocab_size, min(rows, vocab_size - start), start)
    return MatrixLayout((mine,), whole(None, hidden_size))


class VocabEmbedding(MatrixModule):
    """`[tokens]` ids -> `[tokens, hidden]`. weight `[rows, hidden]`: this rank's vocabulary rows."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, vocab_layout(ctx, vocab_size, hidden_size), {"weight": ParamSpec(ctx.dtype)})
        self._lookup = ctx.op("embedding")

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return self._lookup(input_ids, self.weight)
        return self.parallel.all_reduce(self._lookup(input_ids, self.weight, self.layout.outs[0].start))


class LMHead(MatrixModule):
    """From hidden states to vocabulary scores; models compute none themselves.

    `tied_to`: share the embedding's matrix, which is stored plainly. Scores are `scale * h W^T`, then
    `soft_cap * tanh(scores / soft_cap)`, in fp32.
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
        quant = PlainHead() if tied_to is not None else ctx.quant.head(ctx.name)
        specs = quant.params(ctx.dtype)
        super().__init__(ctx, vocab_layout(ctx, vocab_size, hidden_size), specs if tied_to is None else {}, quant=quant)
        if tied_to is not None:
            self.specs, self.weight = specs, tied_to.weight
        self.quant, self.dtype = quant, ctx.dtype
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        # Not `scale`: weight formats have parameters of that name.
        self.logit_scale, self.soft_cap = scale, soft_cap
        self.quant.bind(self, ctx)

    def finalize_weights(self) -> None:
        self.quant.finalize(self)

    @property
    def packed_bytes(self) -> int:
        """Bytes that `finalize_weights` adds to those of the parameters."""
        return self.quant.packed_bytes(self)

    def _finish(self, scores: Tensor) -> Tensor:
        if self.logit_scale != 1.0:
            scores = scores * self.logit_scale
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    @property
    def start(self) -> int:
        """The vocabulary id of this rank's first row."""
        return self.layout.outs[0].start

    def shard_logits(self, hidden: Tensor) -> Tensor:
        """hidden `[n, hidden]` -> fp32 `[n, rows]` of this rank's rows, whose ids begin at `start`."""
        return self._finish(self.quant.logits(self, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[n, hidden]` -> fp32 `[n, vocab]`, the same on every rank."""
        mine = self.shard_logits(hidden)
        if self.parallel.tp_size == 1:
            return mine
        # The last rank may have fewer rows.
        rows = -(-self.vocab_size // self.parallel.tp_size)
        gathered = self.parallel.all_gather(F.pad(mine, (0, rows - mine.shape[1]), value=-math.inf))
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[n, hidden]` -> (value fp32 `[n]`, vocabulary id int64 `[n]`) of the best token, on every rank.

        The value is not finite where a score is NaN.
        """
        value, index = self._shard_argmax(hidden)
        return self.parallel.best(value, index + self.start if self.start else index)

    def _shard_argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.logit_scale <= 0:
            value, index = self.shard_logits(hidden).max(dim=-1)
        else:
            best, index = self.quant.argmax(self, hidden)
            value = self._finish(best)
            if self.soft_cap is not None:
                # It turns infinity, which may stand for NaN, into a number.
                value = best.where(best.isinf(), value)
        return value, index
