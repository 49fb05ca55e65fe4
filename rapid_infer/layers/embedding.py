"""Token embedding and language-model head, both cut by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.parameter import Part, Placement


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
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size, dtype=ctx.dtype), requires_grad=False)

    def parts(self, leaf: str) -> tuple[Part, ...]:
        return (None,)

    def placement(self, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
        if leaf != "weight" or part is not None or expert is not None:
            raise KeyError(leaf)
        shape = (self.vocab_size, self.weight.shape[1])
        source, target = slice(self.start, self.stop), slice(0, self.stop - self.start)
        return Placement(self.weight, shape, (source,), (target,))

    def finalize_weights(self) -> None:
        self.weight.data[self.stop - self.start :].zero_()


class VocabEmbedding(VocabShard):
    """`[tokens]` ids -> `[tokens, hidden]`."""

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        mine = (input_ids >= self.start) & (input_ids < self.stop)
        local = F.embedding((input_ids - self.start).where(mine, 0), self.weight)
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
            self.weight = tied_to.weight
        else:
            super().__init__(ctx, vocab_size, hidden_size)
        self.scale = scale
        self.soft_cap = soft_cap
        self._linear = ctx.op("linear")
        self._packed: Tensor | None = None

    def finalize_weights(self) -> None:
        super().finalize_weights()
        if self._linear.prepare is not None:
            # A second copy: an embedding that shares the matrix, and chosen rows, need it as it was.
            self._packed = self._linear.prepare(self.weight.data[: self.stop - self.start])

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden `[n, hidden]` -> fp32 `[n, this shard's vocabulary]`, or `[n, len(rows)]` for chosen rows."""
        if rows is not None:
            scores = F.linear(hidden, self.weight[rows]).float()
        else:
            weight = self.weight[: self.stop - self.start] if self._packed is None else self._packed
            scores = self._linear(hidden, weight).float()
        if self.scale != 1.0:
            scores = scores * self.scale
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[n, hidden]` -> (value fp32 `[n]`, vocabulary id int64 `[n]`) of the best token in this shard."""
        value, index = self.logits(hidden).max(dim=-1)
        return value, index + self.start
