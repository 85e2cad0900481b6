"""Puts a kernel's source into the function that MLX would put it into, in C++ that clang compiles for the CPU."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from tests.kernel_emulator.kernel import Kernel, Template

METAL_TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}
CUDA_TYPES = METAL_TYPES | {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
SCALARS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel function: a pointer, or a reference where MLX passes a scalar."""

    name: str
    dtype: mx.Dtype
    constant: bool
    scalar: bool
    role: str = "input"

    @property
    def item(self) -> int:
        return int(self.dtype.size)


def metal_unit(kernel: "Kernel", parameters: Sequence[Parameter], template: "Template") -> str:
    declared = ",\n    ".join(_metal_parameter(parameter) for parameter in parameters)
    names = ", ".join(f"{_kind(value)} {name}" for name, value in template)
    values = ", ".join(_literal(value, METAL_TYPES) for _, value in template)
    return "\n".join(
        [
            '#include "metal.h"',
            '#line 1 "kernel header"',
            translate(kernel.header),
            f"template <{names}>" if template else "",
            f"void {kernel.name}(\n    {declared}) {{",
            "EMULATOR_ATTRIBUTES",
            '#line 1 "kernel source"',
            translate(kernel.source),
            "}",
            _entry(kernel.name + (f"<{values}>" if template else ""), [_metal_argument(p) for p in parameters]),
        ]
    )


def cuda_unit(kernel: "Kernel", parameters: Sequence[Parameter], template: "Template") -> str:
    declared = ",\n    ".join(_cuda_parameter(parameter) for parameter in parameters)
    constants = [
        f"using {name} = {_literal(value, CUDA_TYPES)};"
        if isinstance(value, mx.Dtype)
        else f"constexpr {_kind(value)} {name} = {_literal(value, CUDA_TYPES)};"
        for name, value in template
    ]
    return "\n".join(
        [
            '#include "cuda.h"',
            '#line 1 "kernel header"',
            translate(kernel.header, shared="__shared__"),
            f"void {kernel.name}(\n    {declared}) {{",
            *constants,
            '#line 1 "kernel source"',
            translate(kernel.source, shared="__shared__"),
            "}",
            _entry(kernel.name, [_cuda_argument(p) for p in parameters]),
        ]
    )


def translate(text: str, shared: str = "threadgroup") -> str:
    """What a macro cannot express: variables that the group shares, and vectors made by their type's name.

    A declaration such as `threadgroup float tile[8][32];` becomes a reference to storage that the runtime keeps.
    """
    statement = rf"(?P<before>^|[;{{}}]\s*|\n\s*){shared}\s+(?P<declaration>[^;{{}}()=]*);"
    text = re.sub(statement, lambda match: match["before"] + _shared(match["declaration"], shared), text)
    if shared == "__shared__":
        return text
    text = re.sub(rf"\b((?:{SCALARS})[234])\(", r"metal::make<\1>(", text)
    return re.sub(r"\b(vec<[^<>]*>)\(", r"metal::make<\1>(", text)


def _shared(declaration: str, keyword: str) -> str:
    space = keyword if keyword == "threadgroup" else ""
    first, *others = re.split(r",(?![^\[<]*[\]>])", declaration)
    type_, first = re.fullmatch(r"\s*(.*?[\s>])(\w+\s*(?:\[.*)?)", first, re.DOTALL).groups()  # type: ignore[union-attr]
    if re.search(r"[*&]", re.sub(r"\[[^\]]*\]", "", declaration)):  # each thread's own pointer
        return f"{space} {declaration};"
    parts = []
    for declarator in (first, *others):
        name, sizes = re.fullmatch(r"\s*(\w+)\s*(.*)", declarator, re.DOTALL).groups()  # type: ignore[union-attr]
        storage = f'METAL_SHARED("{name}", sizeof({type_}{sizes}), sizeof({type_}), alignof({type_}))'
        parts.append(f"{space} {type_} (&{name}){sizes} = *({space} {type_} (*){sizes})({storage});")
    return " ".join(parts)


def _kind(value: mx.Dtype | int | bool) -> str:
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _literal(value: mx.Dtype | int | bool, types: dict[mx.Dtype, str]) -> str:
    return types[value] if isinstance(value, mx.Dtype) else str(value).lower()


def _metal_parameter(parameter: Parameter) -> str:
    type_ = METAL_TYPES[parameter.dtype]
    if parameter.role in ("output", "atomic"):
        return f"device {f'atomic<{type_}>' if parameter.role == 'atomic' else type_}* {parameter.name}"
    space = "constant" if parameter.constant else "device"
    return f"const {space} {type_}{'&' if parameter.scalar else '*'} {parameter.name}"


def _metal_argument(parameter: Parameter) -> str:
    declared = _metal_parameter(parameter)
    pointer = re.sub(r"[*&] \w+$", "*", declared)
    return ("*" if parameter.scalar else "") + f"({pointer})"


def _cuda_parameter(parameter: Parameter) -> str:
    match parameter.role:
        case "shape":
            return f"const Shape {parameter.name}"
        case "strides":
            return f"const Strides {parameter.name}"
        case "ndim":
            return f"const int {parameter.name}"
    constness = "const " if parameter.role == "input" else ""
    return f"{constness}{CUDA_TYPES[parameter.dtype]}* {parameter.name}"


def _cuda_argument(parameter: Parameter) -> str:
    declared = _cuda_parameter(parameter)
    if parameter.role in ("shape", "strides", "ndim"):
        return f"*({declared.rsplit(' ', 1)[0]}*)"
    return f"({declared.rsplit(' ', 1)[0]})"


def _entry(function: str, casts: Sequence[str]) -> str:
    arguments = ", ".join(f"{cast}buffers[{i}]" for i, cast in enumerate(casts))
    return f"""
#ifndef METAL_ADDRESS_SPACES
extern "C" __attribute__((no_sanitize("thread"))) void emulator_kernel(void** buffers) {{ {function}({arguments}); }}
#else
auto instantiated = &{function};
#endif
"""
