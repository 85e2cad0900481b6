"""Which files of a repository a model needs. The same pure function decides online, offline and in a local folder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from metalctl.engine.errors import AmbiguousTagError, CheckpointError, ModelNotFoundError, TagNotFoundError
from metalctl.engine.models.checkpoint import Format

DEFAULT_TAG = "Q4_K_M"

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf|\.safetensors)", re.IGNORECASE)
_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])(?P<tag>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_SAME_TAG = {"FP16": "F16", "FP32": "F32"}
_PROJECTOR_ORDER = ("F16", "BF16", "F32", "Q8_0")  # of a vision tower in several precisions, the one to take

# Beside the weights: configuration, tokenizer, chat template and processor, as their libraries name them.
_SIDE_FILES = re.compile(
    r"[^/]+\.(json|jinja|tiktoken|model|py|jsonl)"
    r"|(merges|vocab|sentencepiece[^/]*)\.(txt|bpe)|tokenizer[^/]*\.txt"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_[A-Za-z0-9]+/[^/]+\.(json|safetensors)",  # stages of an embedding model
    re.IGNORECASE,
)
_NOT_NEEDED = re.compile(
    r"(?:.*/)?\.[^/]*|training_args[^/]*|trainer_state\.json|README.*|eval[^/]*\.json", re.IGNORECASE
)
_PICKLED = re.compile(r"[^/]+\.(bin|pt|pth|ckpt|pkl)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of one model by their paths in the repository; `weights` come first in `files`."""

    format: Format
    files: tuple[str, ...]
    weights: tuple[str, ...]
    tag: str | None = None  # quantisation of a GGUF file, where its name tells
    others: tuple[str, ...] = ()  # labels of the models that were not taken
    defaulted: bool = False  # nobody asked for this tag

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may want to know of the choice."""
        if not (self.defaulted and self.others):
            return ()
        return (f"No quantisation was asked for: taking {self.tag}. There is also {', '.join(self.others)}.",)


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """One GGUF model of a repository: a file, or the parts of a split one in order."""

    parts: tuple[str, ...]
    tag: str | None

    @property
    def first(self) -> str:
        return self.parts[0]

    @property
    def label(self) -> str:
        return self.tag or self.first


def select(paths: Iterable[str], tag: str | None, where: str) -> Selection:
    """The files of the model that `tag` means among `paths`; `where` names the place in messages.

    `tag` is a quantisation in any case, or the path or name of one `.gguf` file. Without one a repository with several
    GGUF models yields Q4_K_M. Raises TagNotFoundError or AmbiguousTagError with what is there, ModelNotFoundError where
    there is no model at all, CheckpointError where parts are missing or weights are pickled.
    """
    paths = sorted(paths)
    models = gguf_models(paths)
    if tag is None and _is_folder_model(paths):
        return _select_folder(paths, where)
    if not models:
        if tag and _is_folder_model(paths):
            hint = "A quantisation tag chooses among GGUF files. Leave it out."
            raise TagNotFoundError(f"{where} has no GGUF files, so there is no {tag} in it.", hint)
        raise _nothing_to_load(paths, where)
    model = _choose(models, tag, where)
    others = tuple(sorted({other.label for other in models if other is not model}))
    return Selection("gguf", (*model.parts, *_projector(paths, model)), model.parts, model.tag, others, tag is None)


def quantisation(path: str) -> str | None:
    """The quantisation that a GGUF file's name (or else its folder's) tells, as a tag in upper case."""
    folder, _, name = path.rpartition("/")
    for text in (name, folder.rpartition("/")[2]):
        found = [match["tag"].upper() for match in _QUANTISATION.finditer(text)]
        if found:
            return _SAME_TAG.get(found[-1], found[-1])
    return None


def gguf_models(paths: Iterable[str]) -> tuple[GGUFModel, ...]:
    """The GGUF models among `paths`, parts joined; projectors and importance matrices are not models."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path in sorted(paths):
        if not path.lower().endswith(".gguf") or _is_projector(path) or "imatrix" in path.rpartition("/")[2].lower():
            continue
        split = _SPLIT.fullmatch(path)
        groups.setdefault((split["stem"], split["parts"]) if split else (path, ""), []).append(path)
    return tuple(GGUFModel(tuple(parts), quantisation(parts[0])) for parts in groups.values())


def missing_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """Names of the parts that a split file should have and `parts` lacks."""
    split = _SPLIT.fullmatch(parts[0]) if parts else None
    if split is None:
        return ()
    names = (
        f"{split['stem']}-{part:05d}-of-{split['parts']}{split['suffix']}" for part in range(1, int(split["parts"]) + 1)
    )
    return tuple(name for name in names if name not in parts)


def missing_shards(paths: Iterable[str], index: Mapping[str, object]) -> tuple[str, ...]:
    """Files that the `weight_map` of a `model.safetensors.index.json` names and `paths` lacks."""
    weight_map = index.get("weight_map")
    named = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return tuple(sorted(str(name) for name in named - set(paths)))


def _choose(models: tuple[GGUFModel, ...], tag: str | None, where: str) -> GGUFModel:
    found = [model for model in models if _matches(model, tag or DEFAULT_TAG)]
    if tag is None and not found and len(models) == 1:
        found = list(models)
    there = ", ".join(sorted({model.label for model in models}))
    if not found and tag is None:
        raise AmbiguousTagError(f"{where} has several models: {there}.", f"Say which: {where}:{models[0].label}")
    if not found:
        raise TagNotFoundError(f"{where} has no {tag}. It has {there}.", f"Say which: {where}:{models[0].label}")
    if len(found) > 1:
        names = ", ".join(model.first for model in found)
        hint = f"Give the file instead: {where}:{found[0].first}"
        raise AmbiguousTagError(f"{tag or DEFAULT_TAG} fits several models of {where}: {names}.", hint)
    if missing := missing_parts(found[0].parts):
        raise CheckpointError(f"{where} lacks {', '.join(missing)}, a part of {found[0].label}.", "Fetch it again.")
    return found[0]


def _matches(model: GGUFModel, tag: str) -> bool:
    if tag.lower().endswith(".gguf"):
        return any(tag in (part, part.rpartition("/")[2]) for part in model.parts)
    wanted = _SAME_TAG.get(tag.upper(), tag.upper())
    return model.tag is not None and wanted in (model.tag, model.tag.removeprefix("UD-"))


def _is_projector(path: str) -> bool:
    return path.lower().endswith(".gguf") and "mmproj" in path.rpartition("/")[2].lower()


def _projector(paths: Sequence[str], model: GGUFModel) -> tuple[str, ...]:
    """The vision or audio projector that goes with `model`: from its own folder if there is one, else the first."""

    def rank(path: str) -> tuple[bool, int, str]:
        tag = quantisation(path)
        precision = _PROJECTOR_ORDER.index(tag) if tag in _PROJECTOR_ORDER else len(_PROJECTOR_ORDER)
        return path.rpartition("/")[0] != model.first.rpartition("/")[0], precision, path

    projectors = sorted(filter(_is_projector, paths), key=rank)
    return tuple(projectors[:1])


def _is_folder_model(paths: Sequence[str]) -> bool:
    return bool(_folder_weights(paths)) and ("config.json" in paths or "adapter_config.json" in paths)


def _folder_weights(paths: Sequence[str]) -> tuple[str, ...]:
    """Weights at the top of a repository, as mlx-lm finds them; other conversions of the same model are left out."""
    top = [path for path in paths if "/" not in path]
    weights = [path for path in top if path.startswith("model") and path.endswith(".safetensors")]
    if not weights:
        weights = [path for path in top if path.endswith(".safetensors") and not path.startswith("consolidated")]
    return tuple(weights or [path for path in top if path.endswith(".npz")])


def _select_folder(paths: Sequence[str], where: str) -> Selection:
    weights = _folder_weights(paths)
    parts: dict[str, list[str]] = {}
    for path in weights:
        if split := _SPLIT.fullmatch(path):
            parts.setdefault(split["stem"] + split["parts"], []).append(path)
    for group in parts.values():
        if missing := missing_parts(group):
            raise CheckpointError(f"{where} lacks {', '.join(missing)}.", "Fetch it again.")
    side = tuple(path for path in paths if _SIDE_FILES.fullmatch(path) and not _NOT_NEEDED.fullmatch(path))
    return Selection("mlx", (*weights, *(path for path in side if path not in weights)), weights)


def _nothing_to_load(paths: Sequence[str], where: str) -> ModelNotFoundError | CheckpointError:
    if any(_PICKLED.fullmatch(path) for path in paths):
        hint = "Look for a repository of the same model in safetensors, MLX or GGUF form."
        return CheckpointError(f"{where} has its weights only as pickles, which can run code when loaded.", hint)
    shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    there = f"It has {shown}." if paths else "It is empty."
    hint = "A model is a GGUF file, or a config.json with safetensors."
    return ModelNotFoundError(f"{where} holds no model that can be loaded. {there}", hint)
