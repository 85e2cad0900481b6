"""From a checkpoint to an embedder or a reranker."""

from pathlib import Path
from typing import Any

from metalctl.engine.acceleration import accelerate
from metalctl.engine.embedding.decoder import causal, hidden_of, load_decoder
from metalctl.engine.embedding.embedder import Embedder
from metalctl.engine.embedding.families import is_encoder
from metalctl.engine.embedding.native import accelerate_encoder
from metalctl.engine.embedding.recipe import Recipe, is_sentence_model, read_recipe
from metalctl.engine.embedding.reranker import CrossEncoder, Reranker, YesNoReranker, yes_and_no
from metalctl.engine.embedding.weights import load_encoder
from metalctl.engine.errors import CheckpointError, OutOfMemoryError, UnsupportedModelError
from metalctl.engine.memory import device_memory
from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel
from metalctl.engine.models.loader import check_runnable, read_json
from metalctl.engine.models.tokenizer_files import tokenizer_from_folder

OF_ENCODERS = Recipe(poolings=("mean",))
OF_DECODERS = Recipe(poolings=("lasttoken",), normalize=True)


def makes_vectors_only(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is for embedding or scoring, and not for generating text."""
    if checkpoint.format == "gguf":
        from metalctl.engine.embedding.gguf import makes_vectors

        return makes_vectors(checkpoint.path)
    config = read_json(checkpoint.path / "config.json")
    return is_encoder(config) or is_sentence_model(checkpoint.path)


def load_embedder(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Embedder:
    """Loads an encoder, or a decoder as an embedding model. The arrays are evaluated.

    Raises CheckpointError, UnsupportedModelError and OutOfMemoryError.
    """
    check_size(checkpoint)
    if checkpoint.format == "gguf":
        from metalctl.engine.embedding.gguf import embedder_from_gguf

        return embedder_from_gguf(checkpoint)
    folder = checkpoint.path
    config = read_json(folder / "config.json", required=True)
    if is_encoder(config):
        return _from_encoder(checkpoint, config, trust_remote_code)
    check_runnable(folder, config, trust_remote_code)
    model, config = load_decoder(folder, checkpoint.reference)
    notes = accelerate(model)
    tokenizer = tokenizer_from_folder(folder, config, {}, trust_remote_code)
    return Embedder(
        hidden_of(model, config),
        tokenizer,
        read_recipe(folder, OF_DECODERS),
        hidden_size=hidden_size(config),
        max_length=int(config.get("max_position_embeddings") or 4096),
        notes=notes,
    )


def load_reranker(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Reranker:
    """Loads a cross-encoder, or a decoder that is asked for yes or no. The arrays are evaluated.

    Raises CheckpointError, UnsupportedModelError and OutOfMemoryError.
    """
    check_size(checkpoint)
    if checkpoint.format == "gguf":
        raise UnsupportedModelError("Rerankers are not loaded from GGUF.", "Use the safetensors version of the model.")
    folder = checkpoint.path
    config = read_json(folder / "config.json", required=True)
    if is_encoder(config):
        encoder = load_encoder(weight_files(checkpoint), config, checkpoint.reference)
        notes = accelerate_encoder(encoder)
        tokenizer = tokenizer_from_folder(folder, config, {}, trust_remote_code)
        limit = read_recipe(folder, OF_ENCODERS).max_length or encoder.config.max_length
        reranker: Reranker = CrossEncoder(encoder, tokenizer, config, min(limit, encoder.config.max_length))
    else:
        check_runnable(folder, config, trust_remote_code)
        model, config = load_decoder(folder, checkpoint.reference)
        notes = accelerate(model)
        tokenizer = tokenizer_from_folder(folder, config, {}, trust_remote_code)
        limit = int(config.get("max_position_embeddings") or 4096)
        reranker = YesNoReranker(causal(model), yes_and_no(model, tokenizer), tokenizer, limit)
    reranker.notes = notes
    return reranker


def scores_pairs(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a cross-encoder, or names itself a reranker."""
    if checkpoint.format == "gguf":
        return False
    config = read_json(checkpoint.path / "config.json")
    classifies = any("ForSequenceClassification" in name for name in config.get("architectures") or ())
    return (is_encoder(config) and classifies) or "reranker" in checkpoint.reference.lower()


def embedder_of(loaded: LoadedModel) -> Embedder:
    """An embedder over a model that is loaded for generating: the last token's state, normalised."""
    return Embedder(
        hidden_of(loaded.model, loaded.config),
        loaded.tokenizer,
        OF_DECODERS,
        hidden_size=hidden_size(loaded.config),
        max_length=loaded.context_length,
    )


def check_size(checkpoint: Checkpoint) -> None:
    device = device_memory()
    if checkpoint.size > device.recommended:
        raise OutOfMemoryError(
            f"{checkpoint.reference} needs {checkpoint.size / 1e9:.1f} GB for its weights; "
            f"{device.recommended / 1e9:.1f} GB are usable on {device.name}.",
            "Use a smaller model, or one in fewer bits.",
        )


def hidden_size(config: dict[str, Any]) -> int:
    for source in (config, config.get("text_config") or {}):
        for key in ("hidden_size", "n_embd", "d_model"):
            if isinstance(source.get(key), int):
                return int(source[key])
    raise CheckpointError("config.json has no hidden_size.", "Fetch the model again.")


def _from_encoder(checkpoint: Checkpoint, config: dict[str, Any], trust_remote_code: bool) -> Embedder:
    folder = checkpoint.path
    encoder = load_encoder(weight_files(checkpoint), config, checkpoint.reference)
    notes = accelerate_encoder(encoder)
    tokenizer = tokenizer_from_folder(folder, config, {}, trust_remote_code)
    recipe = read_recipe(folder, OF_ENCODERS)
    size, longest = encoder.config.hidden_size, encoder.config.max_length
    return Embedder(encoder, tokenizer, recipe, hidden_size=size, max_length=longest, notes=notes)


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The safetensors at the top of a folder. Raises UnsupportedModelError where there are only pickles."""
    folder = checkpoint.path
    found = [file for file in checkpoint.files if file.suffix == ".safetensors" and file.parent == folder]
    if not found and any(folder.glob("*.bin")):
        raise UnsupportedModelError(
            "The checkpoint's weights are pickles, which can run any code when read.",
            "Use a safetensors, MLX or GGUF version of the model.",
        )
    return found
