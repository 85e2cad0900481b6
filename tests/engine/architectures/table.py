"""The page of supported architectures, from what the engine finds out about a tiny model of each.

`python -m tests.engine.architectures.table` writes it, after it has compared every architecture with mlx-lm; the tests
hold it current row by row.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from metalctl.engine.cache.layout import CacheLayout, KVLayer, OwnLayer, StateLayer
from metalctl.engine.llm_engine import LLMEngine
from tests.engine.architectures import matching, zoo

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"

INTRODUCTION = """\
# Architectures

Every architecture of mlx-lm {version}, and whether metalctl computes what mlx-lm computes.

*Matches* means: a tiny float32 model of the architecture, with no weight at a neutral value, brings the same 16 greedy
tokens through the whole engine as by itself with mlx-lm's own cache, and logits within 2e-5 of the largest (or, where
a model differs from itself by more when it reads the same tokens in one go, within twice that): for prompts that are
read in one go, for prompts that are cut at places that fit no block, for a batch of three lengths, and for a prompt
that is read while others decode.

*Keeps* says what a sequence takes from step to step: keys and values of all its tokens or of those in a window,
states of fixed size. *Decodes* says whether several sequences are stepped as one batch; *one by one* is right but
slower, and is chosen where a trial at load shows that the model's code cannot step a batch.

What follows a colon tells variants of one architecture apart. {matching} of {all} architectures match.

This page is generated: `python -m tests.engine.architectures.table`. Tests hold it current.

| architecture | keeps | decodes | result |
| --- | --- | --- | --- |
"""


def introduction() -> str:
    every = {zoo.module_of(name) for name in zoo.CONFIGS}
    counts = {"matching": len(every - zoo.REFUSED.keys()), "all": len(every)}
    return INTRODUCTION.format(version=version("mlx-lm"), **counts)


def row(name: str, engine: LLMEngine) -> str:
    """The line of an architecture that matches."""
    decodes = "as a batch" if engine.runner.decodes_as_batch else "one by one"
    note = f" ({zoo.REPAIRED[name]})" if name in zoo.REPAIRED else ""
    return f"| {name} | {_keeps(engine.layout)} | {decodes} | matches{note} |"


def refused_row(name: str) -> str:
    return f"| {name} | | | refused: {zoo.REFUSED[name]} |"


def rows() -> list[str]:
    """The lines of the page as it is."""
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]


def documented_version() -> str:
    return PAGE.read_text(encoding="utf-8").partition("of mlx-lm ")[2].partition(",")[0]


def _keeps(layout: CacheLayout) -> str:
    kept = [_kept(layout, leaf) for leaf in layout.leaves]
    return ", ".join(dict.fromkeys(sorted(kept, key=_ORDER.index)))


_ALL, _WINDOW, _STATES, _OWN = "all tokens", "a window", "states", "mlx-lm's own objects (no prefix cache)"
_ORDER = [_ALL, _WINDOW, _STATES, _OWN]


def _kept(layout: CacheLayout, leaf: KVLayer | StateLayer | OwnLayer) -> str:
    if isinstance(leaf, KVLayer):
        return _ALL if layout.groups[leaf.group].window is None else _WINDOW
    return _STATES if isinstance(leaf, StateLayer) else _OWN


def _line(name: str) -> str:
    if name in zoo.REFUSED:
        return refused_row(name)
    model = zoo.build(name)
    reference = matching.reference_of(name, model)
    engine = matching.engine_of(model)
    wrong = matching.mismatches(matching.engine_results(engine), reference)
    if wrong:
        sys.exit(f"{name} does not match:\n" + "\n".join(wrong))
    return row(name, engine)


if __name__ == "__main__":
    mx.disable_compile()
    lines = [_line(name) for name in sorted(zoo.CONFIGS, key=str.lower)]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(introduction() + "\n".join(lines) + "\n", encoding="utf-8")
