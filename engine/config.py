"""The engine's settings. Defaults live here once; the command line and the server read them from here."""

from dataclasses import dataclass
from typing import Literal

PrefixCacheMode = Literal["on", "exact", "off"]
Precision = Literal["size", "exact"]
KVDtype = Literal["auto", "float16", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with. Immutable, so that every part of it sees the same."""

    max_model_len: int | None = None  # tokens a sequence may have in all; None: what the checkpoint was trained for
    max_num_seqs: int = 64  # sequences that run at the same time
    max_num_batched_tokens: int = 512  # tokens that one step computes: all decodes, then prefill chunks
    block_size: int = 16  # tokens in a KV block
    kv_cache_dtype: KVDtype = "auto"  # auto: what the model computes in
    gpu_memory_utilization: float = 0.9  # share of the device's working set that weights and cache may take
    kv_cache_bytes: int | None = None  # an explicit budget for KV blocks and recurrent states, instead of that share
    prefix_cache: PrefixCacheMode = "on"
    batch_prefill: bool | None = None  # several prompts in one forward; None: on a GPU, unless the cache is exact
    compile_decode: bool | None = None  # the decode step as one compiled function; None: on a GPU
    precision: Precision = "size"  # of GGUF types that MLX cannot hold exactly: rounded to 8 bits, or as floats
