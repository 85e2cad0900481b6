"""From the tensors of a GGUF file to a module of mlx-lm that holds them."""

import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
from pathlib import Path
from typing import TypeVar

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
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a part of one, that goes into a parameter. `cut` is its place among the rule's targets."""

    path: Path
    info: TensorInfo
    rule: Rule
    cut: int


@dataclass(frozen=True, slots=True)
class Model:
    """A module with its config and what was decided.

    `filling` reads the weights as it is run through; it yields each part of the module, once, when all of the part's
    own arrays are there, evaluated.
    """

    module: nn.Module
    filling: Iterator[nn.Module]
    config: Config
    notes: list[str]


def build_model(
    header: Header,
    parts: list[tuple[Path, Header]],
    dtype: mx.Dtype,
    precision: Precision,
    row: Architecture | None = None,
    max_model_len: int | None = None,
    halves_stay: bool = False,
) -> Model:
    """Makes the module; its weights are read by `Model.filling`. With `halves_stay` matrices that are float16 or
    bfloat16 in the file are not turned into `dtype`.

    `header` is that of the whole model, `parts` are its files, `row` is what to make of it; None: what the table of
    architectures says.

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
    module.eval()
    kinds = _kinds(module, plan, shapes, dtype, halves_stay)
    arrays = _read(plan, formats, kinds, shapes, config, dtype, precision)
    return Model(module, _fill(module, arrays), config, _notes(header, formats, plan, precision))


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


def _fill(module: nn.Module, arrays: Iterable[tuple[str, mx.array]]) -> Iterator[nn.Module]:
    parts = dict(module.named_modules())
    missing = Counter(name.rpartition(".")[0] for name in dict(tree_flatten(module.parameters())))
    for name, array in arrays:
        owner = name.rpartition(".")[0]
        module.load_weights([(name, array)], strict=False)
        missing[owner] -= 1
        if not missing[owner]:
            yield parts[owner]
    if any(missing.values()):
        raise AssertionError(f"nothing was read for {_some([name for name, count in missing.items() if count])}")


def _kinds(
    module: nn.Module, plan: dict[str, list[Piece]], shapes: Iterable[str], dtype: mx.Dtype, halves_stay: bool
) -> dict[str, mx.Dtype]:
    """The type of each parameter that is not quantised."""
    keep = getattr(module, "cast_predicate", lambda _: True)
    kinds = {name: dtype if keep(name) else mx.float32 for name in shapes}
    for path, layer in module.named_modules() if halves_stay else ():
        found = {piece.info.type for piece in plan.get(f"{path}.weight", [])}
        if hasattr(layer, "to_quantized") and len(found) == 1 and keep(f"{path}.weight"):
            half = quants.HALVES.get(found.pop())
            kinds[f"{path}.weight"] = getattr(mx, half) if half else dtype
    return kinds


def _read(
    plan: dict[str, list[Piece]],
    formats: dict[str, quants.Format],
    kinds: dict[str, mx.Dtype],
    shapes: dict[str, tuple[int, ...]],
    config: Config,
    dtype: mx.Dtype,
    precision: Precision,
) -> Iterator[tuple[str, mx.array]]:
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:

        def begin(target: str, pieces: list[Piece]) -> Iterator[tuple[str, mx.array]]:
            path = target.removesuffix(".weight")
            if path in formats:
                return _quantised(path, pieces, formats[path], config, dtype, precision, pool)
            return _floating(target, pieces, config, shapes[target], kinds[target], pool)

        yield from _one_ahead(starmap(begin, plan.items()))


def _one_ahead(iterators: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """All items, each iterator made before the one in front of it is emptied."""
    for one, _ in pairwise(chain(iterators, [iter(())])):
        yield from one


def _quantised(
    path: str,
    pieces: list[Piece],
    chosen: quants.Format,
    config: Config,
    dtype: mx.Dtype,
    precision: Precision,
    pool: Executor,
) -> Iterator[tuple[str, mx.array]]:
    """The arrays of a quantised layer. Their parts are packed in the pool from now on."""
    rows = _joined([_arranged(piece, map_tensor(piece.path, piece.info), config) for piece in pieces])
    order = None if pieces[0].rule.columns is None else pieces[0].rule.columns(config)
    leading, rows = rows.shape[:-1], rows.reshape(-1, rows.shape[-1])
    parts = quants.pack(pieces[0].info.name, rows, pieces[0].info.type, chosen, pool)

    def assembled() -> Iterator[tuple[str, mx.array]]:
        for name, array in _assembled((_arrays(part, order, dtype, precision) for part in parts), len(rows)).items():
            yield f"{path}.{name}", array.reshape(*leading, -1)

    return assembled()


def _assembled(parts: Iterable[dict[str, mx.array]], count: int) -> dict[str, mx.array]:
    """`count` rows of parts put together, without ever holding two of the whole."""
    result: dict[str, mx.array] = {}
    done = 0
    for part in parts:
        if not result:
            result = {name: mx.zeros((count, array.shape[1]), array.dtype) for name, array in part.items()}
        size = len(part["weight"])
        for name, array in part.items():
            result[name][done : done + size] = array
        mx.eval(result)  # in place, for nothing else holds the arrays
        done += size
    return result


def _arrays(packed: quants.Packed, order: Array | None, dtype: mx.Dtype, precision: Precision) -> dict[str, mx.array]:
    weight, scales = mx.array(_reordered(packed.weight, order)), mx.array(_reordered(packed.scales, order))
    if packed.biases is None:
        return {"weight": weight, "scales": scales}
    biases = mx.array(_reordered(packed.biases, order))
    if precision == "size" and dtype == mx.float32:
        scales, biases = _as_in_float16(scales), _as_in_float16(biases)
    return {"weight": weight, "scales": scales.astype(dtype), "biases": biases.astype(dtype)}


def _as_in_float16(numbers: mx.array) -> mx.array:
    """float32 numbers rounded to float16, but for those that would lose more than its last bit: they stay."""
    narrow = numbers.astype(mx.float16).astype(mx.float32)
    return mx.where(mx.abs(narrow - numbers) <= 2.0**-11 * mx.abs(numbers), narrow, numbers)


def _reordered(array: Array, order: Array | None) -> Array:
    """The last axis in as many equal stretches as `order` has entries, in that order."""
    if order is None:
        return array
    stretches = array.reshape(*array.shape[:-1], len(order), -1)
    return np.ascontiguousarray(stretches[..., order, :]).reshape(array.shape)


def _floating(
    target: str, pieces: list[Piece], config: Config, shape: tuple[int, ...], dtype: mx.Dtype, pool: Executor
) -> Iterator[tuple[str, mx.array]]:
    """One array, which is read when it is asked for: it may be large, and two of them much."""
    arrays = [_numbers(piece, config, pool) for piece in pieces]
    kinds = {array.dtype for array in arrays}
    if kinds == {np.dtype(np.uint16)}:
        result = mx.array(_joined(arrays)).view(mx.bfloat16)
    else:
        result = mx.array(_joined([_as_float(array) for array in arrays] if len(kinds) > 1 else arrays))
    result = result.reshape(shape).astype(dtype)
    mx.eval(result)
    yield target, result


def _numbers(piece: Piece, config: Config, pool: Executor) -> Array:
    """The piece in floating point; bfloat16 as uint16, which numpy can move but not compute with."""
    raw = map_tensor(piece.path, piece.info)
    if piece.info.type in FLOATS and piece.rule.values is None:
        array: Array = raw.view(FLOATS[piece.info.type])
    else:
        array = quants.dequantize(piece.info.name, raw, piece.info.type, pool)
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
