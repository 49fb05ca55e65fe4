"""Checks over ranks and pipeline stages, which are simulated in one process: they say what one rank says."""

from __future__ import annotations

from torch import Tensor

from rapid_infer.layers.moe import MoE
from rapid_infer.parallel import ParallelState
from rapid_infer.testing.conformance.subject import Rank, Subject, expect
from rapid_infer.testing.simulated_ranks import run_ranks

TOLERANCE = 1e-4
SHARE = 0.75
"""How much of the whole checkpoint one of two ranks may read; tiny models have much that is whole on every rank."""


def tensor_parallel(subject: Subject) -> None:
    """Over several ranks the logits of one, with KV heads cut and with KV heads repeated; each reads its share."""
    for size in subject.case.ranks:
        _compare(subject, size, 1)


def expert_parallel(subject: Subject) -> str | None:
    """With experts shared out over two ranks, the logits of one."""
    if not any(isinstance(module, MoE) for module in subject.rank(load=False).model.modules()):
        return "the model has no experts"
    _compare(subject, 2, 2)
    return None


def _compare(subject: Subject, size: int, ep_size: int) -> None:
    tokens = subject.runs[4].prompt
    one = subject.rank()
    assert one.report is not None
    alone, whole = one.logits(tokens), one.report.bytes_read

    def run(parallel: ParallelState) -> tuple[Tensor, Rank]:
        rank = subject.rank(parallel)
        return rank.logits(tokens), rank

    what = f"tensor_parallel_size={size}" + (f", expert_parallel_size={ep_size}" if ep_size > 1 else "")
    heads = getattr(subject.checkpoint.hf_config.get_text_config(), "num_key_value_heads", None)
    hint = ""
    if heads is not None and size > heads:
        hint = f": there are more ranks than its {heads} KV heads; is each KV head replicated where queries use it?"
    try:
        ranks = run_ranks(size, run, ep_size=ep_size)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}{hint}") from error
    for number, (logits, rank) in enumerate(ranks):
        difference = float((logits - alone).abs().max())
        expect(
            difference <= TOLERANCE, f"{what}: logits of rank {number} differ by {difference:.2e} from one rank's{hint}"
        )
        assert rank.report is not None
        read, held = rank.report.bytes_read, sum(p.nbytes for p in rank.model.parameters())
        expect(
            read <= held, f"{what}: rank {number} reads {read} bytes for parameters of {held}: it reads others' shards"
        )
        if size == 2:
            expect(
                read <= SHARE * whole,
                f"{what}: rank {number} reads {read} of {whole} bytes, more than {SHARE:.0%}: what is not cut? Use the "
                "column and row parallel layers",
            )


def stages(subject: Subject) -> None:
    """Two pipeline stages load their shares and, one after the other, give the hidden states of the whole model."""
    tokens = subject.runs[4].prompt
    first, last = (subject.rank(ParallelState(pp_rank=rank, pp_size=2)) for rank in range(2))
    whole = subject.rank().run(tokens)
    difference = float((last.run(tokens, received=first.run(tokens)) - whole).abs().max())
    expect(difference <= TOLERANCE, f"two pipeline stages: hidden states differ by {difference:.2e} from the whole's")
