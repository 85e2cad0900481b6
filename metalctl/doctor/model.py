"""`doctor REF`: a model's files one by one, then the model itself."""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalctl.app import Invocation
from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.doctor.machine import on_cpu
from metalctl.engine.errors import CheckpointError, MetalctlError
from metalctl.engine.memory import device_memory
from metalctl.models import models_of
from metalctl.output import human_bytes

if TYPE_CHECKING:
    from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel

SYSTEM = 4 * 2**30  # bytes that macOS needs for itself
UTILIZATION = 0.9  # of what one process may take, as the engine's default
TEXT = """\
The river leaves its lake at the mill, passes under three bridges and reaches the sea two days later. Nobody who lives
beside it calls it by the name on the maps: upstream it is the Old Water, and downstream, where barges turn in the tide,
simply the Reach. In the year of the long frost they walked across it with lanterns."""
LENGTHS = (50, 23, 5)  # tokens of the self-test's prompts
_SHA256, _GIT_BLOB = 64, 40  # hexadecimal digits


def checks(invocation: Invocation, reference: str, trust_remote_code: bool) -> Iterator[Check]:
    """Everything about one model, up to what makes the rest impossible. Nothing is fetched."""
    models = models_of(invocation)
    try:
        wanted = models.read(reference)
        found = models.find(wanted)
    except MetalctlError as error:
        yield failure("model", error.message, error.hint or "metalctl list shows what is here.")
        return
    yield ok("model", f"{wanted.written(models.default_source)}, {found.format}, {human_bytes(found.size)}")
    broken = False
    for path in found.files:
        check = file(path, _name(path, found))
        broken = broken or check.state == "failure"
        yield check
    if broken:
        return
    device = device_memory()
    yield fits(found.size, device.recommended, device.total)
    yield from _run(invocation, found, trust_remote_code)


def _name(path: Path, found: "Checkpoint") -> str:
    root = found.path if found.path.is_dir() else found.path.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


# -- files


def file(path: Path, name: str) -> Check:
    """Whether a file can be read, is whole, and is the one that was fetched, where its hash is known."""
    again = "Fetch it again: metalctl rm, then metalctl pull."
    try:
        described = _described(path)
        expected = _expected_digest(path)
        if expected and _digest(path, expected) != expected:
            return failure("file", f"{name} is not what was fetched: its hash differs", again)
    except (CheckpointError, ValueError) as error:
        return failure("file", f"{name}: {error}", again)
    except OSError as error:
        return failure("file", f"{name} cannot be read: {error.strerror or error}", again)
    size = human_bytes(path.stat().st_size)
    return ok("file", f"{name}, {size}{described}{', hash as fetched' if expected else ''}")


def _described(path: Path) -> str:
    """What a file holds. Raises CheckpointError or ValueError for one that is damaged or cut short."""
    if path.suffix == ".gguf":
        from metalctl.engine.models.gguf.reader import FileSource, read_header

        return f", {len(read_header(FileSource(path), path.name).tensors)} tensors"
    if path.suffix == ".safetensors":
        return f", {_safetensors(path)} tensors"
    if path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))
    return ""


def _safetensors(path: Path) -> int:
    """How many tensors there are, if the file ends where its header says."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise CheckpointError("it is damaged or cut short")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise CheckpointError(f"it has {size} bytes and should have {end}")
    return len(header)


def _expected_digest(path: Path) -> str | None:
    """The hash that a file was fetched by: in Hugging Face's cache its blob's name, in metalctl's own a record."""
    target = path.resolve()
    if target.parent.name == "blobs" and len(target.name) in (_SHA256, _GIT_BLOB):
        return target.name
    record = path.parent / "metalctl.json"
    if record.is_file():
        files = {entry["name"]: entry["sha256"] for entry in json.loads(record.read_text(encoding="utf-8"))["files"]}
        found: str | None = files.get(path.name)
        return found
    return None


def _digest(path: Path, like: str) -> str:
    """Of the kind that `like` is: sha256, or git's name for a blob."""
    kind = hashlib.sha256() if len(like) == _SHA256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            kind.update(block)
    return kind.hexdigest()


# -- the model


def fits(weights: int, recommended: int, total: int, system: str = sys.platform) -> Check:
    """Whether so many bytes of weights can be loaded here, with something left for a context. On a Mac the GPU may be
    allowed more of the memory than macOS recommends."""
    usable = int(UTILIZATION * recommended)
    shown = f"the model needs {human_bytes(weights)} of {human_bytes(usable)}"
    smaller = "Choose a smaller model or quantisation, or close programs."
    wanted = int(weights / UTILIZATION * 1.15)
    if system == "darwin" and wanted < total - SYSTEM:
        smaller = f"sudo sysctl iogpu.wired_limit_mb={wanted >> 20}, until the next start; or choose a smaller model."
    if weights > usable:
        return failure("model memory", f"{shown}, and does not fit", smaller)
    if weights > 0.9 * usable:
        return warning("model memory", f"{shown}, which leaves little for a context", smaller)
    return ok("model memory", shown)


def _run(invocation: Invocation, found: "Checkpoint", trust_remote_code: bool) -> Iterator[Check]:
    from metalctl.engine import acceleration
    from metalctl.engine.models.loader import load
    from metalctl.engine_start import kernel_cache
    from metalctl.kernels.cpu import library

    acceleration.prepare(kernel_cache(), lambda _: None)  # what there is to say follows
    status = acceleration.status()
    slow = on_cpu() and not library.loaded()
    yield warning("kernels", status, "See the compiler's line above.") if slow else ok("kernels", status)
    began = time.perf_counter()
    try:
        loaded = load(found, trust_remote_code=trust_remote_code)
    except MetalctlError as error:
        yield failure("load", error.message, error.hint or "Try another version of the model.")
        return
    yield ok("load", f"in {time.perf_counter() - began:.1f} s, context {loaded.context_length} tokens")
    yield tokenizer(loaded)
    yield template(loaded)
    yield self_test(loaded)


def tokenizer(loaded: "LoadedModel") -> Check:
    """Whether text comes back from its tokens."""
    text = "The quick brown fox, 123 times."
    ids = loaded.tokenizer.encode(text)
    back = loaded.tokenizer.decode(ids).strip()
    if not ids or not back.lower().endswith(text.lower()):
        fix = "Use another conversion of the model; this one's tokenizer may be damaged."
        return warning("tokenizer", f"{text!r} comes back as {back!r}", fix)
    return ok("tokenizer", f"{loaded.tokenizer.vocab_size} tokens, text comes back as it was")


def template(loaded: "LoadedModel") -> Check:
    """Whether the chat template renders."""
    try:
        ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except MetalctlError as error:
        return warning("chat template", error.message, error.hint or "Use an instruct version of the model to chat.")
    return ok("chat template", f"renders, {len(ids)} tokens for a greeting")


def self_test(loaded: "LoadedModel") -> Check:
    """The paged forward against the model's own."""
    from metalctl.engine import parity

    try:
        result = parity.check(loaded.model, prompts(loaded))
    except MetalctlError as error:
        return failure("self-test", error.message, error.hint or "This version cannot run this architecture.")
    steps = "as a batch" if result.as_batch else "one by one"
    shown = f"{result.tokens} tokens through {result.layers} layers, stepped {steps}"
    if not result.consistent:
        fix = "Prompts may read differently when they are cut: --max-num-batched-tokens above their length avoids that."
        return warning("self-test", f"{shown}: mlx-lm's own code depends on how a prompt is cut", fix)
    if result.difference is None:
        close = f"logits within {result.relative:.0e} of the model's own, which rounding moves by {result.rounding:.0e}"
        return ok("self-test", f"{shown}: {close}; {result.agreeing} of {result.tokens} likeliest tokens agree")
    return failure(
        "self-test", f"{shown}: {_where(result.difference)}", "Please report this, with the output of --json."
    )


def _where(found: Any) -> str:
    place = (
        "no layer differs, but the logits do"
        if found.layer is None
        else (f"layer {found.layer} ({found.kind}) is the first that differs from the model's own")
    )
    return (
        f"{place}: by {found.relative:.1e} of its length where rounding explains {found.allowed:.1e}, "
        f"at token {found.token} of prompt {found.prompt + 1}"
    )


def prompts(loaded: "LoadedModel") -> list[list[int]]:
    """Three beginnings of a text, of different lengths."""
    ids = list(loaded.tokenizer.encode(TEXT))
    return [ids[start : start + length] for start, length in enumerate(LENGTHS)]
