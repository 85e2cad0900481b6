"""Weights of a checkpoint folder into an encoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metalctl.engine.embedding.encoder import Encoder
from metalctl.engine.embedding.families import Family, family, place
from metalctl.engine.errors import CheckpointError, UnsupportedModelError

Arrays = dict[str, mx.array]


def load_encoder(files: list[Path], config: Mapping[str, Any], where: str) -> Encoder:
    """The encoder that `config`, the contents of config.json, describes, with the weights in the safetensors `files`.

    Everything is evaluated. `where` names the checkpoint in messages. Raises UnsupportedModelError and CheckpointError.
    """
    kind = family(config)
    module = Encoder(kind.config(config))
    arrays = _renamed(kind, read_arrays(files, where), where)
    if module.config.head is None:
        arrays = {name: array for name, array in arrays.items() if not name.startswith("head.")}
    _quantise(module, arrays, config.get("quantization") or config.get("quantization_config") or {})
    _check(module, arrays, where)
    module.load_weights(list(arrays.items()), strict=True)
    if mx.default_device() == mx.cpu:
        module.set_dtype(mx.float32)
    module.eval()
    mx.eval(module.parameters())
    return module


def read_arrays(files: list[Path], where: str) -> Arrays:
    """All tensors of some safetensors files, lazily. Raises CheckpointError."""
    arrays: Arrays = {}
    if not files:
        raise CheckpointError(f"{where} has no weights in safetensors.", "Use another conversion of it.")
    for file in files:
        try:
            arrays.update(cast(Arrays, mx.load(str(file))))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", "Fetch the model again.") from error
    return arrays


def _renamed(kind: Family, arrays: Arrays, where: str) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        try:
            targets = place(kind, name)
        except KeyError:
            raise UnsupportedModelError(
                f"{where} has a tensor {name!r} that is not part of this architecture as this version knows it.",
                "A newer metalctl may know it.",
            ) from None
        if targets is not None:
            parts = [array] if len(targets) == 1 else mx.split(array, len(targets))
            found.update(zip(targets, parts, strict=True))
    return found


def _quantise(module: nn.Module, arrays: Arrays, settings: Mapping[str, Any]) -> None:
    """Give the layers whose weights come quantised, as MLX stores them, a form that holds these."""
    if not any(name.endswith(".scales") for name in arrays):
        return
    if "bits" not in settings:
        raise UnsupportedModelError("The weights are quantised in a way that is not MLX's.")
    form = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}
    nn.quantize(module, class_predicate=lambda path, _: form if f"{path}.scales" in arrays else False)


def _check(module: nn.Module, arrays: Arrays, where: str) -> None:
    expected = {name: tuple(value.shape) for name, value in dict(tree_flatten(module.parameters())).items()}
    if missing := sorted(expected.keys() - arrays.keys()):
        raise CheckpointError(f"{where} is incomplete: it has nothing for {missing[0]}.", "Fetch the model again.")
    for name, array in arrays.items():
        if name not in expected:
            raise UnsupportedModelError(f"{where} has weights for {name}, for which its config.json leaves no place.")
        if tuple(array.shape) != expected[name]:
            raise CheckpointError(f"{where}: {name} is {tuple(array.shape)}; config.json says {expected[name]}.")
