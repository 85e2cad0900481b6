"""Writes tiny mlx-lm models as GGUF files, by the rules of llama.cpp's converter.

The names come from the gguf package's own table of Hugging Face names; what the converter does to values is stated
below as data. Nothing here uses the code under test.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGMLQuantizationType, TokenType
from mlx.utils import tree_flatten, tree_unflatten

Config = dict[str, Any]
Tensors = Iterator[tuple[str, np.ndarray]]


def tiny_model(config: Config, seed: int = 0) -> nn.Module:
    """A model with random weights; norms, biases and sinks are away from their neutral values."""
    source = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = source.Model(source.ModelArgs.from_dict(config))
    if config.get("tie_word_embeddings") and "lm_head" in model:
        model.pop("lm_head")
        model.tie_word_embeddings = True
    rng = np.random.default_rng(seed)
    weights = [(name, mx.array(_values(name, array.shape, rng))) for name, array in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    model.eval()
    return model


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith(("A_log", "dt_bias")):
        return np.abs(values)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        return 0.1 * values
    if len(shape) == 1 or "norm" in name:
        return 0.3 * values + (0 if name.endswith(("bias", "sinks")) else 1)
    return values * (0.5 if "embed" in name else shape[-1] ** -0.5 * 1.5)


def permute(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """The order of rotary dimensions in llama.cpp's "normal" rope."""
    return lambda a: a.reshape(heads, 2, a.shape[0] // heads // 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


PERMUTED = {"llama", "mixtral", "ministral3", "granite", "granitemoe", "granitemoehybrid", "smollm3"}
SHIFTED = {"gemma", "gemma2", "gemma3_text"}


def hf_tensors(config: Config, model: nn.Module, architecture: str = "") -> Tensors:
    """The model's tensors by the names of its Hugging Face checkpoint, with the values that the converter writes."""
    kind = config["model_type"]
    if "linear_num_key_heads" in config:
        yield from _linear_attention(config, model, tiles=architecture != "qwen3next")
        return
    for name, array in tree_flatten(model.parameters()):
        value = np.array(array.astype(mx.float32))
        if kind in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads"] if ".q_proj." in name else config["num_key_value_heads"]
            value = permute(heads)(value)
        if kind in SHIFTED and "norm" in name:
            value = value + 1
        yield from _renamed(kind, config, name, value)


def tiled(config: Config, value: np.ndarray, axis: int = 0) -> np.ndarray:
    """Qwen3.5's heads of values in turns of one for each head of keys, instead of groups by head of keys."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    moved = np.moveaxis(value, axis, 0)
    grouped = moved.reshape(keys, values // keys, -1, *moved.shape[1:])
    return np.moveaxis(grouped.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def _delta_net(config: Config, name: str, value: np.ndarray, reorder: bool) -> np.ndarray:
    if not reorder:
        return value
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate([value[:first], tiled(config, value[first:])])
    if name.endswith("out_proj.weight"):
        return tiled(config, value, axis=1)
    return value if name.endswith("norm.weight") else tiled(config, value)


def _linear_attention(config: Config, model: nn.Module, tiles: bool) -> Tensors:
    """Qwen3.5's tensors, or with `tiles` off Qwen3-Next's, which keeps betas and alphas in one."""
    betas: dict[str, np.ndarray] = {}
    for name, array in tree_flatten(model.parameters()):
        value = np.array(array.astype(mx.float32))
        name = name.removeprefix("language_model.")
        if ".linear_attn." in name:
            value = _delta_net(config, name, value.squeeze(-1) if "conv1d" in name else value, tiles)
        if name.endswith("A_log"):
            yield name, -np.exp(value)
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), value
        elif not tiles and "in_proj_b." in name:
            betas[name.split("in_proj_b")[0]] = value
        elif not tiles and "in_proj_a." in name:
            keys, stem = config["linear_num_key_heads"], name.split("in_proj_a")[0]
            pair = [part.reshape(keys, -1, part.shape[-1]) for part in (betas[stem], value)]
            yield f"{stem}in_proj_ba.weight", np.concatenate(pair, axis=1).reshape(-1, value.shape[-1])
        elif name.endswith(("in_proj_qkv.weight", "in_proj_z.weight")):
            kind = "attn_qkv" if "qkv" in name else "attn_gate"
            yield f"blk.{name.split('.')[2]}.{kind}.weight", value
        else:
            yield name, value


def _renamed(kind: str, config: Config, name: str, value: np.ndarray) -> Tensors:
    if name.endswith("A_log"):
        yield name, -np.exp(value).reshape(-1, 1)
    elif name.endswith((".mamba.D", ".mixer.D")):
        yield name, value.reshape(-1, 1)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias" if kind == "granitemoehybrid" else "dt.bias"), value
    elif "conv1d.weight" in name or "conv.conv.weight" in name:
        yield name, value.squeeze(-1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        yield name, value.reshape(groups, -1)
    elif name.endswith(".sinks"):
        yield name + ".weight", value
    elif name.endswith(("e_score_correction_bias", "expert_bias")):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", value
    elif ".embed_q." in name or ".unembed_out." in name:
        yield name.replace("embed_q", "k_b_proj").replace("unembed_out", "v_b_proj"), value
    elif name.endswith(".layer_scalar"):
        yield name + ".weight", value
    elif name.endswith((".router.scale", ".router.per_expert_scale")):
        kind = "ffn_down_exps" if "expert" in name else "ffn_gate_inp"
        yield f"blk.{name.split('.')[2]}.{kind}.scale", value
    elif ".mixer.switch_mlp." in name:
        yield f"blk.{name.split('.')[2]}.ffn_{'up' if '.fc1.' in name else 'down'}_exps.weight", value
    elif ".experts.switch_glu." in name:
        yield f"blk.{name.split('.')[2]}.ffn_{name.split('.')[-2].removesuffix('_proj')}_exps.weight", value
    elif ".kv_b_proj." in name:
        yield from _split_kv_b(config, name, value)
    elif ".shared_mlp.input_linear" in name:
        gate, up = np.split(value, 2)
        layer = name.split(".")[2]
        yield f"blk.{layer}.ffn_gate_shexp.weight", gate
        yield f"blk.{layer}.ffn_up_shexp.weight", up
    elif ".norms." in name:
        stem, number = name.removesuffix(".weight").split(".norms.")
        yield f"{stem}.norms.{number}.weight", value
    else:
        yield name, value


def _split_kv_b(config: Config, name: str, value: np.ndarray) -> Tensors:
    """Multi-head latent attention: keys transposed for each head, values as they are."""
    nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    each = value.reshape(config["num_attention_heads"], -1, rank)
    yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(each[:, :nope].swapaxes(1, 2))
    yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(each[:, nope:])


# Names that mlx-lm changes against the checkpoint, as (mlx-lm's, the checkpoint's) parts of a name.
EXPERTS = ((".switch_mlp.", ".experts."),)
NUMBERED_EXPERTS = tuple(
    (f".switch_mlp.{ours}_proj", f".experts.{theirs}")
    for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
)
LFM2_EXPERTS = tuple(
    (f".feed_forward.{inside}{ours}_proj", f".feed_forward.{theirs}")
    for inside, outside in (("switch_mlp.", "experts."), ("", ""))
    for ours, theirs in (("gate", f"{outside}w1"), ("down", f"{outside}w2"), ("up", f"{outside}w3"))
)
NUMBERED = ("mixtral", "granitemoe", "granitemoehybrid")
RENAMES = {"lfm2_moe": LFM2_EXPERTS} | dict.fromkeys(NUMBERED, NUMBERED_EXPERTS)


def gguf_name(architecture: str, kind: str, layers: int, name: str) -> str:
    if name.startswith("blk."):
        return name
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], layers)
    for ours, theirs in RENAMES.get(kind, EXPERTS):
        name = name.replace(ours, theirs)
    if ".feed_forward.experts." in name:
        name = name.removeprefix("model.")
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(f"{architecture}: {name}")
    return found


def write_gguf(
    path: Path,
    architecture: str,
    config: Config,
    model: nn.Module,
    metadata: dict[str, Any],
    *,
    kind: Callable[[str, np.ndarray], GGMLQuantizationType] | None = None,
    values: Callable[[str, np.ndarray], np.ndarray] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    tokenizer: bool = True,
) -> Path:
    """`metadata` without the architecture's prefix. `kind` chooses a tensor's type; float32 without it. `values`
    changes a tensor's numbers, `extra` adds tensors or replaces them, `drop` leaves some out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}", value)
    if tokenizer:
        add_byte_vocabulary(writer, config["vocab_size"])
    tensors: dict[str, np.ndarray] = {}
    norms: dict[str, list[np.ndarray]] = {}
    for name, value in hf_tensors(config, model, architecture):
        if ".norms." in name:
            norms.setdefault(name.split(".norms.")[0] + ".weight", []).append(value)
            continue
        tensors[gguf_name(architecture, config["model_type"], config["num_hidden_layers"], name)] = value
    for name, rows in norms.items():
        tensors[gguf_name(architecture, config["model_type"], config["num_hidden_layers"], name)] = np.stack(rows)
    tensors.update(extra or {})
    for name, value in tensors.items():
        if name in drop:
            continue
        value = values(name, value) if values else value
        add_tensor(writer, name, value, kind(name, value) if kind else GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: GGMLQuantizationType) -> None:
    value = np.ascontiguousarray(value)
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, value.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def add_byte_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """GPT-2's kind: 256 bytes, two control tokens, some merges, and unused tokens up to `size`."""
    alphabet = byte_alphabet()
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "the"), ("i", "n"), ("e", "r")]
    tokens = [*alphabet, "<|im_start|>", "<|im_end|>", *("".join(pair) for pair in merges)]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * len(merges)
    unused = size - len(tokens)
    tokens += [f"[PAD{index}]" for index in range(unused)]
    types += [TokenType.UNUSED] * unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
