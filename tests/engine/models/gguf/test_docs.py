"""docs/gguf.md names what there is."""

from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES

from metalctl.engine.models.gguf.architectures import ARCHITECTURES
from metalctl.engine.models.gguf.quants import FORMATS, explain

PAGE = (Path(__file__).parents[4] / "docs" / "gguf.md").read_text(encoding="utf-8")


def test_every_architecture_is_listed() -> None:
    assert ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)) in PAGE


def test_every_block_type_has_its_row() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 5]
    for kind, chosen in FORMATS.items():
        values, size = GGML_QUANT_SIZES[kind]
        scales = {"affine": 32, "mxfp4": 8, "nvfp4": 8}[chosen.mode] / chosen.group_size
        assert f"| {kind.name} | {8 * size / values:.2f} | {chosen.bits + scales:.2f} | {explain(kind)} |" in rows
