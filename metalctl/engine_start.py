"""From a reference on the command line to an engine that answers: what chat, serve and bench begin with."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalctl.app import Invocation
from metalctl.engine.config import EngineConfig
from metalctl.output import Output, human_bytes
from metalctl.sampling import generation_defaults

if TYPE_CHECKING:
    from metalctl.engine.engine_thread import EngineThread
    from metalctl.engine.llm_engine import LLMEngine
    from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel


@dataclass(frozen=True)
class RunningEngine:
    """An engine in its thread, and what is known of its model."""

    thread: "EngineThread"
    checkpoint: "Checkpoint"
    generation_defaults: Mapping[str, Any]
    load_seconds: float  # without fetching


@contextmanager
def running_engine(
    invocation: Invocation, reference: str, config: EngineConfig, *, trust_remote_code: bool = False
) -> Iterator[RunningEngine]:
    """Find or fetch the model, load it, and run the engine until the block ends.

    Raises what finding and loading raise: ModelNotFoundError, HubError, CheckpointError, OutOfMemoryError and so on.
    """
    checkpoint = find_model(invocation, reference)
    output = invocation.output
    began = time.perf_counter()
    loaded: list[LoadedModel] = []
    with _busy(output, f"loading {checkpoint.reference}, {human_bytes(checkpoint.size)}"):
        thread = _start(_loader(checkpoint, config, trust_remote_code, loaded, invocation), output)
    try:
        for note in loaded[0].notes:
            output.detail(note)
        seconds = time.perf_counter() - began
        output.detail(f"loaded in {seconds:.1f} s")
        trained = loaded[0].context_length
        if config.max_model_len and config.max_model_len > trained:
            output.warn(f"the model was trained for {trained} tokens; beyond that its answers may make no sense.")
        yield RunningEngine(thread, checkpoint, generation_defaults(checkpoint, loaded[0]), seconds)
    finally:
        thread.close()


def find_model(invocation: Invocation, reference: str) -> "Checkpoint":
    """The model's files, fetched with a progress display when they are not here and that is allowed."""
    from metalctl.engine.models.resolve import resolve
    from metalctl.progress import fetch_progress

    settings = invocation.settings
    with fetch_progress(invocation.output) as progress:
        return resolve(
            reference,
            offline=invocation.offline,
            default_source=settings.default_source,
            aliases=settings.aliases,
            cache=settings.cache,
            progress=progress,
        )


def before_mlx(output: Output) -> None:
    """What has an effect only before mlx is imported for the first time."""
    from metalctl.engine import heap
    from metalctl.kernels import blas

    heap.map_large_blocks()
    # MLX's CUDA backend ends the process when it has met twice as many shapes of graphs as it keeps.
    os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4000")
    library = blas.preload()
    if library:
        output.detail(f"matrix products by {library}")


def _start(load: "Callable[[], LLMEngine]", output: Output) -> "EngineThread":
    before_mlx(output)
    from metalctl.engine.engine_thread import EngineThread

    return EngineThread.start(load)


def _loader(
    checkpoint: "Checkpoint",
    config: EngineConfig,
    trust_remote_code: bool,
    loaded: "list[LoadedModel]",
    invocation: Invocation,
) -> "Callable[[], LLMEngine]":
    """What the engine's thread does first. Leaves the model in `loaded`, for what is known of it besides the engine."""

    def load() -> "LLMEngine":
        from metalctl.engine import acceleration
        from metalctl.engine.llm_engine import LLMEngine
        from metalctl.engine.models.loader import load as load_model

        acceleration.prepare(kernel_cache(), invocation.output.note)
        loaded.append(
            load_model(
                checkpoint,
                trust_remote_code=trust_remote_code,
                precision=config.precision,
                max_model_len=config.max_model_len,
            )
        )
        return LLMEngine(loaded[0], config)

    return load


def kernel_cache() -> Path:
    """Where compiled kernels are kept: they belong to the machine, so not where a user moves models to."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("metalctl", appauthor=False)) / "kernels"


def _busy(output: Output, message: str) -> AbstractContextManager[object]:
    return output.stderr.status(f"[dim]{message}[/]", spinner="dots") if output.interactive else nullcontext()
