"""`metalctl embed`: texts to vectors."""

import base64
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from metalctl.app import Invocation, command
from metalctl.commands.options import TrustRemoteCode
from metalctl.embed_input import InputFormat, Text, from_arguments, from_file, from_pipe
from metalctl.engine.errors import ContextLengthError, MetalctlError, StorageError, UsageError
from metalctl.engine_start import find_model, kernel_cache
from metalctl.output import Output, human_bytes

if TYPE_CHECKING:
    from metalctl.engine.embedding.embedder import Embedder, Tokens
    from metalctl.engine.embedding.pooling import Vector

WINDOW = 2048  # texts that are read, ordered by length and computed before the next are read


class VectorFormat(StrEnum):
    JSON = "json"
    JSONL = "jsonl"
    NPY = "npy"
    BASE64 = "base64"


@dataclass(frozen=True)
class Wanted:
    """What the options say of the vectors. `prompt` is text; None: the checkpoint's default."""

    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    truncate: bool
    budget: int | None


@dataclass(slots=True)
class Embedded:
    text: Text
    tokens: int
    was_cut: bool
    vector: "Vector"


@dataclass(slots=True)
class Totals:
    texts: int = 0
    tokens: int = 0
    cut: int = 0


@command("embed")
def embed(
    invocation: Invocation,
    reference: Annotated[str, typer.Argument(metavar="REF", help="The model.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What to embed; without, lines from a pipe.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Lines, .jsonl or .csv, instead of TEXT.")] = None,
    input_format: Annotated[
        InputFormat | None, typer.Option(help="What is piped in or in the file; by default its name tells.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="The field or column that holds the text.")] = None,
    format: Annotated[
        VectorFormat, typer.Option("--format", help="base64 is that of little-endian float32, one text a line.")
    ] = VectorFormat.JSON,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the vectors to this file.")] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep so many numbers of each vector.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, such as query.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Put this text before each.")] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Length one, or not; by default the model says.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate/--no-truncate", help="Cut texts that are too long, or refuse them.")
    ] = True,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that are computed together.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Turn texts into vectors.

    Pooling, prompts and length are those that the model's own files ask for. Any model for chat works, too: its last
    token's state is the vector.
    """
    if texts and file:
        raise UsageError("there are texts, and there is a --file.", "Give one of them.")
    if prompt is not None and prompt_name is not None:
        raise UsageError("--prompt and --prompt-name exclude each other.")
    to_screen = output is None and sys.stdout.isatty()
    if format is VectorFormat.NPY and (to_screen or (output is None and invocation.output.json)):
        raise UsageError("npy is not text.", "Name an --output file, or pipe it on without --json.")
    source = from_arguments(texts) if texts else from_file(file, input_format, field) if file else None
    source = source or from_pipe(input_format, field)
    first = next(source, None)
    if first is None:
        raise UsageError("there is no text: the input is empty.")
    embedder, name = _load(invocation, reference, trust_remote_code)
    wanted = Wanted(prompt, prompt_name, dimensions, normalize, truncate, batch_tokens)
    embedder.check_dimensions(dimensions)
    totals, began = Totals(), time.perf_counter()
    with _progress(invocation.output) as advance:
        made = _embedded(embedder, itertools.chain([first], source), wanted, totals, advance)
        _write(invocation.output, output, format, made, name, totals)
    _tell(
        invocation.output, totals, dimensions or embedder.dimensions, time.perf_counter() - began, embedder.max_length
    )


def _load(invocation: Invocation, reference: str, trust_remote_code: bool) -> "tuple[Embedder, str]":
    checkpoint = find_model(invocation, reference)
    output = invocation.output
    from metalctl.kernels import blas

    blas.preload()  # before mlx is imported for the first time, or it has no effect
    from metalctl.engine import acceleration
    from metalctl.engine.embedding.load import load_embedder

    acceleration.prepare(kernel_cache(), output.note)
    output.detail(f"loading {checkpoint.reference}, {human_bytes(checkpoint.size)}")
    embedder = load_embedder(checkpoint, trust_remote_code=trust_remote_code)
    for note in embedder.notes:
        output.detail(note)
    return embedder, checkpoint.reference


def _embedded(
    embedder: "Embedder", source: Iterator[Text], wanted: Wanted, totals: Totals, advance: Callable[[int], None]
) -> Iterator[Embedded]:
    """Vectors in the order of the texts, a window of these at a time."""
    from metalctl.engine.embedding.embedder import computed

    prompt = embedder.prompt(wanted.prompt_name) if wanted.prompt is None else wanted.prompt
    while window := list(itertools.islice(source, WINDOW)):
        items = [_prepared(embedder, text, prompt, wanted.truncate) for text in window]
        vectors: list[Vector | None] = [None] * len(items)
        for indices, found in computed(embedder.compute, items, wanted.budget):
            for index, vector in zip(indices, found, strict=True):
                with _blaming(window[index]):
                    vectors[index] = embedder.finish(vector, wanted.dimensions, wanted.normalize)
            advance(len(indices))
        for text, item, finished in zip(window, items, vectors, strict=True):
            assert finished is not None
            totals.texts += 1
            totals.tokens += len(item.ids)
            totals.cut += item.was_cut
            yield Embedded(text, len(item.ids), item.was_cut, finished)


def _prepared(embedder: "Embedder", text: Text, prompt: str, truncate: bool) -> "Tokens":
    with _blaming(text):
        return embedder.prepare(text.text, prompt, truncate=truncate)


@contextmanager
def _blaming(text: Text) -> Iterator[None]:
    """An error inside the block says which text it comes from."""
    try:
        yield
    except (UsageError, ContextLengthError) as error:
        raise type(error)(f"{text.place}: {error.message}", error.hint) from error
    except MetalctlError as error:
        error.message = f"{text.place}: {error.message}"
        raise


# -- output


def _write(
    output: Output, path: Path | None, kind: VectorFormat, made: Iterator[Embedded], name: str, totals: Totals
) -> None:
    if output.json and path is None and kind is VectorFormat.JSONL:
        for index, entry in enumerate(made):
            output.event("embedding", **_record(index, entry, kind))
        output.event("done", status="ok", data={"model": name, "texts": totals.texts, "tokens": totals.tokens})
        return
    if output.json and path is None:
        entries = [_record(index, entry, kind) for index, entry in enumerate(made)]
        output.result(_summary(name, totals, entries))
        return
    with _opened(path) as stream:
        dimensions = _WRITERS[kind](stream, made)
    output.result({**_summary(name, totals, None), "dimensions": dimensions, "path": str(path)})


def _record(index: int, entry: Embedded, kind: VectorFormat) -> dict[str, Any]:
    vector: Any = _base64(entry.vector) if kind is VectorFormat.BASE64 else numbers(entry.vector)
    cut = {"truncated": entry.was_cut}
    return {"index": index, "id": entry.text.id, "tokens": entry.tokens, **cut, "embedding": vector}


def _summary(name: str, totals: Totals, entries: list[dict[str, Any]] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": name, "texts": totals.texts, "tokens": totals.tokens, "truncated": totals.cut}
    return fields if entries is None else {**fields, "embeddings": entries}


def numbers(vector: "Vector") -> list[float]:
    """A vector as the shortest decimals that are read back as the same float32."""
    return [float(str(value)) for value in vector]


def _base64(vector: "Vector") -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _write_json(stream: BinaryIO, made: Iterator[Embedded]) -> int:
    size, before = 0, b"["
    for entry in made:
        stream.write(before + json.dumps(numbers(entry.vector)).encode())
        size, before = len(entry.vector), b",\n "
    stream.write(b"]\n")
    return size


def _write_jsonl(stream: BinaryIO, made: Iterator[Embedded]) -> int:
    size = 0
    for index, entry in enumerate(made):
        record = {"index": index, "id": entry.text.id, "embedding": numbers(entry.vector)}
        stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        stream.flush()
        size = len(entry.vector)
    return size


def _write_base64(stream: BinaryIO, made: Iterator[Embedded]) -> int:
    size = 0
    for entry in made:
        stream.write(_base64(entry.vector).encode() + b"\n")
        size = len(entry.vector)
    return size


def _write_npy(stream: BinaryIO, made: Iterator[Embedded]) -> int:
    import io

    import numpy as np

    vectors = np.stack([entry.vector for entry in made]).astype("<f4")
    whole = io.BytesIO()  # a pipe cannot tell its position, which numpy asks for
    np.save(whole, vectors)
    stream.write(whole.getbuffer())
    return int(vectors.shape[1])


_WRITERS: dict[VectorFormat, Callable[[BinaryIO, Iterator[Embedded]], int]] = {
    VectorFormat.JSON: _write_json,
    VectorFormat.JSONL: _write_jsonl,
    VectorFormat.BASE64: _write_base64,
    VectorFormat.NPY: _write_npy,
}


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO]:
    """Where the vectors go. A file appears under its name only when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _progress(output: Output) -> Iterator[Callable[[int], None]]:
    """A count on a terminal; nothing elsewhere, nor when the vectors themselves go to the terminal."""
    if not output.interactive or sys.stdout.isatty():
        yield lambda count: None
        return
    done = 0
    status: AbstractContextManager[Any] = output.stderr.status("[dim]embedding[/]", spinner="dots")
    with status as display:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            display.update(f"[dim]{done} texts embedded[/]")

        yield advance


def _tell(output: Output, totals: Totals, dimensions: int, seconds: float, limit: int) -> None:
    if totals.cut:
        what = "1 text was" if totals.cut == 1 else f"{totals.cut} texts were"
        output.warn(f"{what} cut to the {limit} tokens that the model takes. --no-truncate refuses such texts.")
    speed = totals.tokens / max(seconds, 1e-9)
    counts = f"{totals.texts} texts, {totals.tokens} tokens, {dimensions} dimensions"
    output.detail(f"{counts}, {seconds:.2f} s ({speed:.0f} tokens/s)")
