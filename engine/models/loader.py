"""From a checkpoint on this machine to a model that is ready to run."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from metalctl.engine import heap
from metalctl.engine.acceleration import accelerate
from metalctl.engine.config import Precision
from metalctl.engine.errors import CheckpointError, OutOfMemoryError, UnsupportedModelError
from metalctl.engine.memory import device_memory
from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel
from metalctl.engine.models.gguf.architectures import architecture
from metalctl.engine.models.gguf.describe import loaded_bytes
from metalctl.engine.models.gguf.mapping import Architecture
from metalctl.engine.models.gguf.parts import merge_headers, read_headers
from metalctl.engine.models.gguf.reader import Header
from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.tokenizer_files import tokenizer_from_folder
from metalctl.kernels.cpu import library

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def load(
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool = False,
    dtype: mx.Dtype | None = None,
    precision: Precision = "size",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads weights, tokenizer and configuration. The arrays are evaluated: any thread may use them.

    `dtype` is that of activations and of what is not quantised; None chooses by the device. `precision` "exact" keeps
    the values of GGUF types that MLX has no like of. `max_model_len`, how long sequences will get at most, decides
    between two sets of rotary factors for models that have them. Raises CheckpointError for broken files,
    UnsupportedModelError for what cannot be run, OutOfMemoryError for what does not fit, before anything large is
    allocated.
    """
    if checkpoint.format == "gguf":
        return _load_gguf(checkpoint, dtype, precision, max_model_len)
    return _load_folder(checkpoint, trust_remote_code)


def _load_gguf(
    checkpoint: Checkpoint, dtype: mx.Dtype | None, precision: Precision, max_model_len: int | None
) -> LoadedModel:
    from metalctl.engine.models.gguf.weights import build_model

    paths = list(checkpoint.files)
    headers = read_headers(paths)
    header = merge_headers(headers)
    row = architecture(header)
    dtype = dtype or _natural_dtype(row)
    halves_stay = library.loaded()  # our kernels read them as they are
    _check_memory(checkpoint, loaded_bytes(header, precision, dtype.size, halves_stay))
    tokenizer, notes = build_tokenizer(header)
    parts = list(zip(paths, headers, strict=True))
    model = build_model(header, parts, dtype, precision, max_model_len=max_model_len, halves_stay=halves_stay)
    with heap.recycled():
        replaced = accelerate(model.module, model.filling)
    return LoadedModel(
        model=model.module,
        tokenizer=tokenizer,
        config=model.config,
        context_length=int(model.config["max_position_embeddings"]),
        fingerprint=_fingerprint(checkpoint, str(dtype), precision),
        generation_defaults=_sampling_defaults(header),
        notes=(*notes, *model.notes, *replaced),
    )


def _check_memory(checkpoint: Checkpoint, needed: int) -> None:
    """Raises OutOfMemoryError, with both numbers, when the weights alone are more than may be used."""
    device = device_memory()
    if needed > device.recommended:
        raise OutOfMemoryError(
            f"{checkpoint.reference} needs {needed / 1e9:.1f} GB for its weights; "
            f"{device.recommended / 1e9:.1f} GB can be used on {device.name}.",
            "Use a smaller model, or one in fewer bits.",
        )


def _natural_dtype(row: Architecture) -> mx.Dtype:
    """What the device computes fastest in: float32 on a CPU, elsewhere 16 bits that the model does not overflow."""
    if mx.default_device() == mx.cpu:
        return mx.float32
    return mx.bfloat16 if row.wide_range else mx.float16


def _sampling_defaults(header: Header) -> dict[str, Any]:
    return {name: header.metadata[key] for key, name in SAMPLING.items() if key in header.metadata}


def _fingerprint(checkpoint: Checkpoint, *choices: str) -> str:
    """Names the weights as they are loaded: by revision where there is one, and by each file's size, time and ends."""
    digest = hashlib.sha256("\0".join([checkpoint.revision or "", *choices]).encode())
    for path in checkpoint.files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(status.st_size - (1 << 16), 0))
            digest.update(file.read(1 << 16))
    return digest.hexdigest()[:32]


def _load_folder(checkpoint: Checkpoint, trust_remote_code: bool) -> LoadedModel:
    from mlx_lm.utils import load_model

    folder = checkpoint.path
    config = read_json(folder / "config.json", required=True)
    check_runnable(folder, config, trust_remote_code)
    _check_memory(checkpoint, sum(path.stat().st_size for path in folder.glob("model*.safetensors")))
    try:
        model, config = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        mx.eval(model.parameters())
    except (ValueError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise CheckpointError(
            f"{checkpoint.reference} cannot be loaded: {error}", "The files may be incomplete: fetch the model again."
        ) from error
    generation = read_json(folder / "generation_config.json")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer_from_folder(folder, config, generation, trust_remote_code),
        config=config,
        context_length=_context_length(config),
        fingerprint=_fingerprint(checkpoint),
        generation_defaults=generation,
        notes=tuple(accelerate(model)),
    )


def check_runnable(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Raises UnsupportedModelError when the checkpoint would need code of its own, or has no weights that are safe."""
    hint = "If you trust its publisher, allow that with --trust-remote-code."
    if config.get("model_file") and not trust_remote_code:
        raise UnsupportedModelError(f"The checkpoint brings its own code ({config['model_file']}) to be run.", hint)
    if not config.get("model_file") and not _is_known(config):
        code = config.get("auto_map")
        raise UnsupportedModelError(
            f"The installed mlx-lm has no model of the type {config.get('model_type')!r}"
            + (", and the checkpoint's own code (auto_map) is not run." if code else "."),
            "A newer mlx-lm may have it: pip install -U mlx-lm.",
        )
    if not any(folder.glob("model*.safetensors")):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise UnsupportedModelError(
                f"The checkpoint's weights are pickles ({', '.join(pickles[:3])}), which can run any code when read.",
                "Use a safetensors, MLX or GGUF version of the model.",
            )
        raise CheckpointError(f"There are no weights (model*.safetensors) in {folder}.", "Fetch the model again.")


def _is_known(config: dict[str, Any]) -> bool:
    from mlx_lm.utils import _get_classes

    try:
        _get_classes(config)
    except (ValueError, KeyError):
        return False
    return True


def _context_length(config: dict[str, Any]) -> int:
    text = config.get("text_config") or {}
    for source in (config, text):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"):
            if isinstance(source.get(key), int):
                return int(source[key])
    return 4096


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty when it is absent and not required. Raises CheckpointError."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"There is no {path.name} in {path.parent}.", "Fetch the model again.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch the model again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold an object.", "Fetch the model again.")
    return value
