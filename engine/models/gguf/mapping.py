"""The words in which architectures are described: where each tensor goes, and what happens to it on the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from metalctl.engine.errors import CheckpointError
from metalctl.engine.models.gguf.quants import dequantize
from metalctl.engine.models.gguf.reader import Header, TensorInfo, map_tensor

Array = npt.NDArray[Any]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one GGUF tensor.

    `targets` are modules (the tensor's own `.weight` or `.bias` is appended) or, with `whole`, parameters; several
    when the tensor is cut. `rows` rearranges or cuts leading axes, so it works on packed rows as well as on numbers.
    `values` needs numbers: such a tensor is held in floating point. `part` orders tensors that are joined into one
    target. With `each`, a key of the config, the one target has a place for a number: so many modules take a share.
    `columns` gives a new order of equal stretches of columns.
    """

    targets: tuple[str, ...]
    rows: Callable[[Array, Config], Array | tuple[Array, ...]] | None = None
    values: Callable[[Array, Config], Array] | None = None
    part: int = 0
    whole: bool = False
    each: str | None = None
    columns: Callable[[Config], Array] | None = None


def to(
    *targets: str,
    rows: Callable[[Array, Config], Array | tuple[Array, ...]] | None = None,
    values: Callable[[Array, Config], Array] | None = None,
    part: int = 0,
    whole: bool = False,
    each: str | None = None,
    columns: Callable[[Config], Array] | None = None,
) -> Rule:
    return Rule(targets, rows, values, part, whole, each, columns)


Names = Mapping[str, Rule | str | None]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF in terms of one model type of mlx-lm.

    `config` makes the config of mlx-lm from the metadata. `names` maps tensors outside the layers, and `layers` those
    of a layer (without `blk.N.`), to modules; None: known, and not needed. Targets in `layers` start at `layer_path`.
    """

    config: Callable[["Keys"], Config]
    names: Names
    layers: Names
    layer_path: str = "model.layers.{}."
    prepare: Callable[[Any, "Keys"], None] | None = None  # what the module needs that no config can say
    wide_range: bool = False  # activations that overflow float16
    unused: Callable[[int, str, Config], bool] | None = None  # tensors of a layer that the file has for nothing
    variant: Callable[[Header], "Architecture | None"] | None = None  # another row for some files of the same name
    module: Callable[[Config], Any] | None = None  # makes the empty module; None: mlx-lm's, by config["model_type"]

    def rule(self, tensor: str) -> tuple[Rule, str, int | None] | None:
        """(rule, suffix, layer) of a tensor's name; None: not needed. Raises KeyError when the name is not known."""
        stem, suffix = tensor, ""
        for ending in (".weight", ".bias"):
            if tensor.endswith(ending):
                stem, suffix = tensor.removesuffix(ending), ending
        layer: int | None = None
        table = self.names
        if stem.startswith("blk."):
            _, number, stem = stem.split(".", 2)
            layer, table = int(number), self.layers
        found = table[stem + suffix] if stem + suffix in table else table[stem]
        if found is None:
            return None
        return (Rule((found,)) if isinstance(found, str) else found), suffix, layer

    def targets(self, rule: Rule, suffix: str, layer: int | None, config: Config) -> list[str]:
        """The full names of the parameters."""
        prefix = "" if layer is None else self.layer_path.format(layer)
        names = rule.targets
        if rule.each:
            names = tuple(names[0].format(number) for number in range(config[rule.each]))
        return [prefix + name + ("" if rule.whole else suffix) for name in names]


class Keys:
    """The metadata of one architecture: its keys without their prefix."""

    def __init__(self, header: Header, tensors: dict[str, tuple[Path, TensorInfo]], max_model_len: int | None = None):
        self.header = header
        self.max_model_len = max_model_len  # tokens that a sequence will have at most, where that is known
        self.architecture = header.architecture
        self.tensors = tensors

    @property
    def extra_layers(self) -> int:
        """Layers after the model's own that predict further tokens, for speculation; they are not loaded."""
        return self.integer("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        return self.integer("block_count") - self.extra_layers

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def rows(self, tensor: str) -> int:
        """The number of rows of a matrix. Raises CheckpointError when it is not there."""
        if tensor not in self.tensors:
            raise CheckpointError(f"{self.header.name} has no tensor {tensor!r}.", "Download or convert it again.")
        return self.tensors[tensor][1].shape[0]

    def tensor(self, name: str) -> list[float]:
        """The numbers of a small tensor."""
        self.rows(name)
        path, info = self.tensors[name]
        return list(dequantize(name, map_tensor(path, info), info.type).reshape(-1).tolist())

    def integer(self, key: str, default: int | None = None) -> int:
        """A number; of a list with one entry a layer, the largest."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray) and len(value):
            return int(value.max())
        return int(self._required(key, self.header.get(f"{self.architecture}.{key}", int, default)))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._required(key, self.header.get(f"{self.architecture}.{key}", float, default)))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.header.get(f"{self.architecture}.{key}", bool, default))

    def text(self, key: str) -> str | None:
        return self.header.get(f"{self.architecture}.{key}", str)

    def optional(self, key: str) -> float | None:
        return self.header.get(f"{self.architecture}.{key}", float)

    def each_layer(self, key: str) -> list[Any]:
        """One entry a layer; a single number stands for all."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        layers = self.layers
        if isinstance(value, np.ndarray):
            if len(value) < layers:
                raise CheckpointError(
                    f"{self.header.name}: {self.architecture}.{key} is too short for {layers} layers."
                )
            return list(value[:layers].tolist())
        return [self._required(key, value)] * layers

    def _required(self, key: str, value: Any) -> Any:
        return self.header.require(f"{self.architecture}.{key}", object) if value is None else value


def heads(config: Config, key: str = "num_attention_heads") -> int:
    return int(config[key])


def interleave(key: str) -> Callable[[Array, Config], Array]:
    """Undoes the order in which llama.cpp keeps rotary dimensions: pairs side by side, instead of halves apart."""

    def rows(array: Array, config: Config) -> Array:
        count = heads(config, key)
        parts = array.reshape(count, array.shape[0] // count // 2, 2, *array.shape[1:])
        return parts.swapaxes(1, 2).reshape(array.shape)

    return rows


def shares(array: Array, config: Config) -> tuple[Array, ...]:
    """One row for each module."""
    return tuple(array)


def query_key_value(array: Array, config: Config) -> tuple[Array, ...]:
    """Cuts a fused projection by its rows."""
    queries = heads(config) * config["head_dim"]
    keys = heads(config, "num_key_value_heads") * config["head_dim"]
    return array[:queries], array[queries : queries + keys], array[queries + keys :]


def minus_one(array: Array, config: Config) -> Array:
    """Norms that llama.cpp stores with the one that Gemma's code adds."""
    return array - np.float32(1)


def halves(array: Array, config: Config) -> tuple[Array, Array]:
    """Cuts the rows of a matrix, or of each expert's, in the middle."""
    middle = array.shape[-2] // 2
    return array[..., :middle, :], array[..., middle:, :]


def log_of_negative(array: Array, config: Config) -> Array:
    """State space models: llama.cpp stores A = -exp(A_log)."""
    return np.log(-array).reshape(-1)


def flat(array: Array, config: Config) -> Array:
    return array.reshape(-1)


def as_convolution(array: Array, config: Config) -> Array:
    """[channels, width] as MLX wants it: [channels, width, 1]."""
    return array.reshape(array.shape[0] if array.ndim == 2 else -1, array.shape[-1], 1)
