"""How a checkpoint wants its vectors made: the files that the sentence-transformers library keeps beside a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.loader import read_json

MODULES = "modules.json"

# The flags of a pooling stage, in the order in which several results are put side by side.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_LIMITS = 1 << 20  # tokens; what says more means that there is no limit


@dataclass(frozen=True, slots=True)
class DenseStage:
    """A linear layer after pooling: where its weights lie, and the name of its activation."""

    folder: Path
    activation: str
    bias: bool
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """`poolings` are values of POOLINGS. `max_length` is in tokens; None: what the model itself allows.

    Without `pools_prompt` the tokens of a prompt are left out of means and maxima.
    """

    poolings: tuple[str, ...] = ("mean",)
    pools_prompt: bool = True
    dense: tuple[DenseStage, ...] = ()
    normalize: bool = False
    lowercase: bool = False
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # its name


def is_sentence_model(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def read_recipe(folder: Path, otherwise: Recipe) -> Recipe:
    """What the files in `folder` say; `otherwise` where there is no modules.json.

    Raises UnsupportedModelError for a stage that is not known, CheckpointError for broken files.
    """
    settings = read_json(folder / "config_sentence_transformers.json")
    poolings, pools_prompt, normalize, base = otherwise.poolings, True, otherwise.normalize, folder
    dense: list[DenseStage] = []
    if is_sentence_model(folder):
        poolings, pools_prompt, normalize, dense, base = _stages(folder)
    prompts = settings.get("prompts") or {}
    limits = [_positive(read_json(base / "sentence_bert_config.json").get("max_seq_length"))]
    limits.append(_positive(read_json(folder / "tokenizer_config.json").get("model_max_length")))
    return Recipe(
        poolings=poolings,
        pools_prompt=pools_prompt,
        dense=tuple(dense),
        normalize=normalize,
        lowercase=bool(read_json(base / "sentence_bert_config.json").get("do_lower_case", False)),
        max_length=min((limit for limit in limits if limit), default=None),
        prompts={name: text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt=settings.get("default_prompt_name"),
    )


def _stages(folder: Path) -> tuple[tuple[str, ...], bool, bool, list[DenseStage], Path]:
    """Poolings, whether they include prompts, normalising, dense layers, where the transformer is."""
    poolings: tuple[str, ...] = ("mean",)
    pools_prompt, normalize, base = True, False, folder
    dense: list[DenseStage] = []
    for stage in _read_list(folder / MODULES):
        kind, place = str(stage.get("type", "")).rpartition(".")[2], folder / str(stage.get("path", ""))
        match kind:
            case "Transformer":
                base = place
            case "Pooling":
                settings = read_json(place / "config.json", required=True)
                poolings, pools_prompt = _poolings(settings), bool(settings.get("include_prompt", True))
            case "Dense":
                dense.append(_dense(place))
            case "Normalize":
                normalize = True
            case _:
                raise UnsupportedModelError(
                    f"The checkpoint's vectors go through a stage {kind!r}, which this version does not know.",
                    "A newer metalctl may know it.",
                )
    return poolings, pools_prompt, normalize, dense, base


def _poolings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    named = settings.get("pooling_mode")
    if named is not None:
        names = tuple(named.split("+")) if isinstance(named, str) else tuple(named)
        unknown = [name for name in names if name not in POOLINGS.values()]
    else:
        unknown = [key for key, on in settings.items() if key.startswith("pooling_mode") and on and key not in POOLINGS]
        names = tuple(name for key, name in POOLINGS.items() if settings.get(key))
    if unknown or not names:
        raise UnsupportedModelError(f"The pooling {', '.join(unknown) or 'of no kind'} is not known.")
    return names


def _dense(folder: Path) -> DenseStage:
    settings = read_json(folder / "config.json", required=True)
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    try:
        sizes = int(settings["in_features"]), int(settings["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json has no sizes.", "Fetch the model again.") from error
    return DenseStage(folder, activation, bool(settings.get("bias", True)), *sizes)


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch the model again.") from error
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CheckpointError(f"{path} does not hold a list of stages.", "Fetch the model again.")
    return sorted(value, key=lambda stage: int(stage.get("idx", 0)))


def _positive(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and 0 < value < _LIMITS else None
