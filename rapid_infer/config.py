"""Engine options: what a user may set (`EngineArgs`), and the frozen configs that the runtime reads.

`EngineArgs.resolve` is the one place where "auto" (None) becomes a value. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from rapid_infer.errors import ConfigError
from rapid_infer.fields import check_fields, unknown_field

DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
    "float32": "float32", "fp32": "float32", "float": "float32",
}  # fmt: skip
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("fp8", "fp8_row", "fp8_block", "nvfp4", "mxfp4")
HUBS = ("auto", "huggingface", "modelscope")
KV_CACHE_DTYPES = {
    "auto": None, "bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4",
}  # fmt: skip
MODEL_IMPLS = ("plugin", "auto", "fallback")

Text = Annotated[str, Meta(min_length=1, description="non-empty text")]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NumBytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, Meta(gt=0, le=1, description="a number in (0, 1]")]
Ranks = Annotated[int, Meta(ge=1, le=64)]
QueueDepth = Annotated[int, Meta(ge=1, le=2)]


@dataclass(frozen=True)
class DeviceInfo:
    """What config resolution needs to know of the device: `type` ("cpu", "cuda"), native bf16, bytes of free memory."""

    type: str
    bfloat16: bool
    free_memory: int


@dataclass(frozen=True)
class CheckpointInfo:
    """What config resolution needs to know of the checkpoint; dtype None when config.json names none.

    `max_position_embeddings` is the plugin's, which has lengthened config.json's by its RoPE scaling.
    """

    max_position_embeddings: int
    dtype: str | None


@dataclass(frozen=True)
class ModelConfig:
    dtype: str
    max_model_len: int
    max_model_len_is_auto: bool
    load_format: str
    seed: int
    quantization: str | None = None


@dataclass(frozen=True)
class CacheConfig:
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str | None = None
    """How keys and values are stored: "bf16", "fp8", "nvfp4"; None: in the model's type."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    queue_depth: int


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine was started with, resolved; `notes` says in words which "auto" was decided and why."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: str
    enforce_eager: bool = False
    num_threads: int | None = None
    op_priority: tuple[tuple[str, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps are recorded."""
        return self.device == "cuda" and not self.enforce_eager


@dataclass(frozen=True)
class EngineArgs:
    """What a user may set; None and "auto" are decided by `resolve`. docs/options.md is made from this list.

    tensor_parallel_size    ranks that cut each matrix between them, each on a GPU of its own or a share of the cores
    expert_parallel_size    groups of those ranks that share out a MoE layer's experts; divides tensor_parallel_size. 1:
                            every rank has a part of every expert
    dtype                   auto (the checkpoint's; float32 where the CPU has no fast 16-bit arithmetic), bfloat16, ...
    device                  auto (a GPU if there is one), cpu, cuda
    load_format             auto (safetensors, else .bin), or dummy for seeded random weights
    quantization            round 16-bit weights while they are loaded: fp8 (a scale for each matrix), fp8_row,
                            fp8_block (128 x 128), nvfp4, mxfp4; auto: as the checkpoint is, quantized or not
    kv_cache_dtype          how the cache keeps keys and values: auto (the model's type), bf16, fp8 (e4m3, with the
                            scales that the files have, else 1.0), nvfp4 (on a CPU alone)
    max_model_len           longest sequence, prompt and answer; auto: the model's own, less if the cache is smaller
    max_num_seqs            requests that run at once; auto: 256 on a GPU, 64 on a CPU
    max_num_batched_tokens  tokens of one step; auto: 8192 on a GPU, 512 on a CPU. With fewer, other requests' answers
                            flow more evenly beside long prompts, whose first token comes a little later; a model with
                            experts then takes prompts in more slowly (Qwen3-30B-A3B by a fifth at 2048)
    block_size              tokens of one cache block; auto: 64 on a GPU, 16 on a CPU
    gpu_memory_utilization  share of the GPU's memory that weights, steps and cache may take together
    kv_cache_memory_bytes   size of the cache; auto: what is measured to be left, on a CPU a quarter of what is free, at
                            most 4 GiB
    enable_prefix_caching   keep the blocks of past prompts for requests that start the same
    enable_chunked_prefill  let a long prompt be computed in pieces, between other requests' tokens
    enforce_eager           launch every operator on its own instead of recording CUDA graphs
    queue_depth             steps in flight; 2 plans a step before the tokens of the last are read; auto: 2 on a GPU,
                            1 on a CPU
    skip_tokenizer_init     load no tokenizer: prompts are token ids, and there is no text
    seed                    of requests that bring none of their own
    revision                branch, tag or commit on a hub
    hub                     auto ($RAPID_INFER_HUB, else Hugging Face and then ModelScope), huggingface, modelscope, or
                            an order with commas
    model_plugin            the distribution to take the model from when several offer it
    model_impl              plugin (one made for the architecture), auto (such a plugin, else one that serves as a
                            fallback for any architecture), or fallback (that one in any case)
    num_threads             CPU threads; auto: OMP_NUM_THREADS, else the physical cores this process may use
    op_priority             per operator, the providers to try, in order: {"paged_attention": ["torch"]}
    """

    tensor_parallel_size: Ranks = 1
    expert_parallel_size: Ranks = 1
    dtype: str = "auto"
    device: Text = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    block_size: Count | None = None
    gpu_memory_utilization: Share = 0.9
    kv_cache_memory_bytes: NumBytes | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    queue_depth: QueueDepth | None = None
    skip_tokenizer_init: bool = False
    seed: Seed = 0
    revision: Text | None = None
    hub: str = "auto"
    model_plugin: Text | None = None
    model_impl: str = "plugin"
    num_threads: Count | None = None
    op_priority: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Build from keyword arguments; an unknown one is a ConfigError with the nearest known name."""
        if unknown := unknown_field(cls, kwargs):
            raise ConfigError(f"unknown argument {unknown}")
        return cls(**kwargs)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        _check(self.dtype in ("auto", *DTYPES), "dtype", self.dtype, f"'auto' or one of {sorted(set(DTYPES.values()))}")
        _check(self.load_format in LOAD_FORMATS, "load_format", self.load_format, f"one of {list(LOAD_FORMATS)}")
        if self.quantization is not None:
            _check(
                self.quantization in QUANTIZATIONS, "quantization", self.quantization, f"one of {list(QUANTIZATIONS)}"
            )
        _check(
            self.kv_cache_dtype != "fp8_e5m2", "kv_cache_dtype", self.kv_cache_dtype,
            "'fp8', which is e4m3: e5m2 has a bit less for each value and its range is not needed beside scales",
        )  # fmt: skip
        kv_dtypes = "one of ['auto', 'bf16', 'fp8', 'nvfp4']"
        _check(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", self.kv_cache_dtype, kv_dtypes)
        _check(self.model_impl in MODEL_IMPLS, "model_impl", self.model_impl, f"one of {list(MODEL_IMPLS)}")
        hubs = self.hub.split(",")
        _check(set(hubs) <= set(HUBS), "hub", self.hub, f"one of {list(HUBS)}, or several in order with commas")

    def resolve(self, checkpoint: CheckpointInfo, device: DeviceInfo) -> EngineConfig:
        """Decide every "auto". ConfigError when the values cannot work together."""
        notes: list[str] = []
        on_gpu = device.type == "cuda"
        dtype = self._resolve_dtype(checkpoint, device, notes)
        kv_cache_dtype = KV_CACHE_DTYPES[self.kv_cache_dtype]
        if kv_cache_dtype == "nvfp4" and on_gpu:
            raise ConfigError("kv_cache_dtype='nvfp4' runs on a CPU alone; on a GPU use 'fp8', 'bf16' or 'auto'")
        max_model_len = self.max_model_len or checkpoint.max_position_embeddings
        if max_model_len > checkpoint.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={max_model_len} is more than the {checkpoint.max_position_embeddings} positions of the "
                "model (max_position_embeddings in config.json, and what RoPE scaling makes of it); use at most that, "
                "or add to config.json the scaling that the model's authors recommend"
            )
        rows = self.max_num_seqs or (256 if on_gpu else 64)
        batched = self.max_num_batched_tokens or (8192 if on_gpu else 512)
        if not self.enable_chunked_prefill:
            if self.max_num_batched_tokens is not None and batched < max_model_len:
                raise ConfigError(
                    f"max_num_batched_tokens={batched} is less than max_model_len={max_model_len}, which without "
                    "chunked prefill leaves prompts that can never run; raise it or leave enable_chunked_prefill on"
                )
            if self.max_num_batched_tokens is None:
                # The longest prompt has room beside rows that decode, or it would wait until they have all ended.
                batched = max(batched, max_model_len + rows)
        if rows > batched:
            # A row without a share of the budget would wait until an earlier one ends.
            notes.append(f"max_num_seqs lowered from {rows} to max_num_batched_tokens={batched}")
            rows = batched
        return EngineConfig(
            model=ModelConfig(
                dtype, max_model_len, self.max_model_len is None, self.load_format, self.seed, self.quantization
            ),
            cache=CacheConfig(
                block_size=self.block_size or (64 if on_gpu else 16),
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                enable_prefix_caching=self.enable_prefix_caching,
                kv_cache_dtype=None if kv_cache_dtype == "bf16" and dtype == "bfloat16" else kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=batched,
                enable_chunked_prefill=self.enable_chunked_prefill,
                # Launching is synchronous on a CPU: a second step in flight hides nothing there and wastes one at each
                # end.
                queue_depth=self.queue_depth or (2 if on_gpu else 1),
            ),
            parallel=ParallelConfig(self.tensor_parallel_size, self.expert_parallel_size),
            device=device.type,
            enforce_eager=self.enforce_eager,
            num_threads=self.num_threads,
            op_priority=tuple((op, tuple(providers)) for op, providers in self.op_priority.items()),
            notes=tuple(notes),
        )

    def _resolve_dtype(self, checkpoint: CheckpointInfo, device: DeviceInfo, notes: list[str]) -> str:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        wanted = checkpoint.dtype or "bfloat16"
        if wanted not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"config.json names dtype {wanted!r}; pass dtype= one of bfloat16, float16, float32")
        slow = (wanted == "float16") or (wanted == "bfloat16" and not device.bfloat16)
        if device.type == "cpu" and slow:
            notes.append(f"dtype float32: this CPU has no fast {wanted} arithmetic (pass dtype={wanted!r} to keep it)")
            return "float32"
        return wanted


def _check(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {expected}, got {got!r}")
