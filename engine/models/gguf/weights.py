"""From the tensors of a GGUF file to a module of mlx-lm that holds them."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from metalctl.engine.config import Precision
from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.gguf import quants
from metalctl.engine.models.gguf.architectures import architecture
from metalctl.engine.models.gguf.mapping import Architecture, Array, Config, Keys, Rule
from metalctl.engine.models.gguf.quants import FLOATS
from metalctl.engine.models.gguf.reader import Header, TensorInfo, map_tensor

Type = quants.Type


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a part of one, that goes into a parameter. `cut` is its place among the rule's targets."""

    path: Path
    info: TensorInfo
    rule: Rule
    cut: int


@dataclass(frozen=True, slots=True)
class Model:
    """A module with its config, the number of its parameters and what was decided."""

    module: nn.Module
    config: Config
    notes: list[str]


def build_model(
    header: Header,
    parts: list[tuple[Path, Header]],
    dtype: mx.Dtype,
    precision: Precision,
    row: Architecture | None = None,
    max_model_len: int | None = None,
) -> Model:
    """Makes the module and fills it. `header` is that of the whole model, `parts` are its files, `row` is what to make
    of it; None: what the table of architectures says.

    Everything is checked before any weight is read: UnsupportedModelError for what this version cannot run,
    CheckpointError for missing tensors, strangers and wrong shapes.
    """
    row = row or architecture(header)
    keys = Keys(header, {info.name: (path, info) for path, part in parts for info in part.tensors}, max_model_len)
    config = row.config(keys)
    plan = _plan(row, keys, config)
    module: nn.Module = row.module(config) if row.module else _empty_module(config)
    formats = _choose_formats(module, plan, config, precision)
    shapes = {name: tuple(array.shape) for name, array in dict(tree_flatten(module.parameters())).items()}
    _check_complete(header, shapes, plan)
    nn.quantize(module, class_predicate=lambda path, _: formats[path].parameters if path in formats else False)
    if row.prepare:
        row.prepare(module, keys)
    keep = getattr(module, "cast_predicate", lambda _: True)
    weights: list[tuple[str, mx.array]] = []
    for target, pieces in plan.items():
        path = target.removesuffix(".weight")
        if path in formats:
            weights += _quantised(path, pieces, formats[path], config, dtype)
        else:
            weights.append((target, _floating(pieces, config, shapes[target], dtype if keep(target) else mx.float32)))
        mx.eval([array for _, array in weights[-3:]])
    module.load_weights(weights, strict=True)
    module.eval()
    return Model(module, config, _notes(header, formats, plan, precision))


def _plan(row: Architecture, keys: Keys, config: Config) -> dict[str, list[Piece]]:
    """For each parameter, the tensors that it is made of."""
    plan: dict[str, list[Piece]] = {}
    extra = tuple(f"blk.{keys.layers + number}." for number in range(keys.extra_layers))
    for name, (path, info) in keys.tensors.items():
        quants.check_type(name, info.type)
        if name.startswith(extra):
            continue
        try:
            found = row.rule(name)
        except (KeyError, ValueError) as error:
            raise UnsupportedModelError(
                f"{keys.header.name} has a tensor {name!r} that is not part of the architecture "
                f"{keys.architecture!r} as this version knows it.",
                "A newer metalctl may know it; the MLX version of the model may work.",
            ) from error
        if found is None:
            continue
        rule, suffix, layer = found
        if row.unused and layer is not None and row.unused(layer, name.split(".", 2)[2], config):
            continue
        for cut, target in enumerate(row.targets(rule, suffix, layer, config)):
            plan.setdefault(target, []).append(Piece(path, info, rule, cut))
    for pieces in plan.values():
        pieces.sort(key=lambda piece: piece.rule.part)
    return plan


def _empty_module(config: Config) -> nn.Module:
    """mlx-lm's module for the config. Its arrays are lazy: nothing is allocated."""
    name = config["model_type"]
    try:
        source = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        raise UnsupportedModelError(
            f"The installed mlx-lm has no model {name!r}.", "Install a newer mlx-lm."
        ) from error
    module: nn.Module = source.Model(source.ModelArgs.from_dict(config))
    if config.get("tie_word_embeddings") and "lm_head" in module:
        module.pop("lm_head")
        module.tie_word_embeddings = True
    return module


def _choose_formats(
    module: nn.Module, plan: dict[str, list[Piece]], config: Config, precision: Precision
) -> dict[str, quants.Format]:
    """For each module that will hold a quantised matrix, its format."""
    formats = {}
    for path, layer in module.named_modules():
        pieces = plan.get(f"{path}.weight", [])
        if not hasattr(layer, "to_quantized") or not pieces or any(piece.rule.values for piece in pieces):
            continue
        kinds = {piece.info.type for piece in pieces}
        chosen = quants.quantised_format(next(iter(kinds)), precision)
        columns = pieces[0].rule.columns
        stretch = layer.weight.shape[-1] // (1 if columns is None else len(columns(config)))
        if chosen is not None and len(kinds) == 1 and stretch % chosen.group_size == 0:
            formats[path] = chosen
    return formats


def _check_complete(header: Header, expected: dict[str, tuple[int, ...]], plan: dict[str, list[Piece]]) -> None:
    missing = sorted(expected.keys() - plan.keys())
    if missing:
        raise CheckpointError(
            f"{header.name} is incomplete: it has nothing for {_some(missing)}.", "Download or convert it again."
        )
    strangers = sorted(piece.info.name for name in plan.keys() - expected.keys() for piece in plan[name])
    if strangers:
        raise UnsupportedModelError(
            f"{header.name} has tensors that its own metadata leave no place for: {_some(strangers)}.",
            "The file was made for another version of the model.",
        )
    shares: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in expected.items():
        shares.setdefault(plan[name][0].info.name, []).append(shape)
    for name, shape in expected.items():
        _check_shape(header, plan[name], shape, shares[plan[name][0].info.name])


def _check_shape(header: Header, pieces: list[Piece], shape: tuple[int, ...], siblings: list[tuple[int, ...]]) -> None:
    """As many values as the parameters take in all, in rows of the right length."""
    found = sum(piece.info.size for piece in pieces)
    wanted = sum(int(np.prod(sibling, dtype=np.int64)) for sibling in siblings)
    free = any(piece.rule.values or piece.rule.each for piece in pieces)
    if found != wanted or not (free or all(piece.info.shape[-1] == shape[-1] for piece in pieces)):
        raise CheckpointError(
            f"{header.name}: tensor {pieces[0].info.name!r} has the shape {pieces[0].info.shape}; "
            f"{shape} is what the metadata call for.",
            "The file is damaged or was converted wrongly.",
        )


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _quantised(
    path: str, pieces: list[Piece], chosen: quants.Format, config: Config, dtype: mx.Dtype
) -> Iterator[tuple[str, mx.array]]:
    rows = [_arranged(piece, map_tensor(piece.path, piece.info), config) for piece in pieces]
    packed = quants.pack(pieces[0].info.name, _joined(rows), pieces[0].info.type, chosen)
    order = None if pieces[0].rule.columns is None else pieces[0].rule.columns(config)
    yield f"{path}.weight", mx.array(_reordered(packed.weight, order))
    scales = mx.array(_reordered(packed.scales, order))
    yield f"{path}.scales", scales if packed.biases is None else scales.astype(dtype)
    if packed.biases is not None:
        yield f"{path}.biases", mx.array(_reordered(packed.biases, order)).astype(dtype)


def _reordered(array: Array, order: Array | None) -> Array:
    """The last axis in as many equal stretches as `order` has entries, in that order."""
    if order is None:
        return array
    stretches = array.reshape(*array.shape[:-1], len(order), -1)
    return np.ascontiguousarray(stretches[..., order, :]).reshape(array.shape)


def _floating(pieces: list[Piece], config: Config, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    arrays = [_numbers(piece, config) for piece in pieces]
    kinds = {array.dtype for array in arrays}
    if kinds == {np.dtype(np.uint16)}:
        result = mx.array(_joined(arrays)).view(mx.bfloat16)
    else:
        result = mx.array(_joined([_as_float(array) for array in arrays] if len(kinds) > 1 else arrays))
    return result.reshape(shape).astype(dtype)


def _numbers(piece: Piece, config: Config) -> Array:
    """The piece in floating point; bfloat16 as uint16, which numpy can move but not compute with."""
    raw = map_tensor(piece.path, piece.info)
    if piece.info.type in FLOATS and piece.rule.values is None:
        array: Array = raw.view(FLOATS[piece.info.type])
    else:
        array = quants.dequantize(piece.info.name, raw, piece.info.type)
    if piece.rule.values is not None:
        array = piece.rule.values(array, config)
    if piece.rule.columns is not None:
        array = _reordered(array, piece.rule.columns(config))
    return _arranged(piece, array, config)


def _as_float(array: Array) -> Array:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _arranged(piece: Piece, array: Array, config: Config) -> Array:
    if piece.rule.rows is None:
        return array
    arranged = piece.rule.rows(array, config)
    return arranged[piece.cut] if isinstance(arranged, tuple) else arranged


def _joined(arrays: list[Array]) -> Array:
    """Rows upon rows; of experts, each expert's."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays, axis=-2 if arrays[0].ndim > 1 else 0)


def _notes(
    header: Header, formats: dict[str, quants.Format], plan: dict[str, list[Piece]], precision: Precision
) -> list[str]:
    notes = []
    rounded = sorted({plan[f"{path}.weight"][0].info.type.name for path, f in formats.items() if not f.exact})
    if rounded:
        notes.append(
            f"Tensors stored as {', '.join(rounded)} are rounded, for MLX has no such type; "
            "the precision 'exact' keeps their values and takes more memory."
        )
    return notes
