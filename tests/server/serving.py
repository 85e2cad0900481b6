"""A server on the loopback interface in a thread of this process, with models that need no files."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from byte_tokenizer import byte_tokenizer

from metalctl.engine.config import EngineConfig
from metalctl.engine.engine_thread import EngineThread
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.models.tokenizer import Tokenizer
from metalctl.server.app import create_app
from metalctl.server.guard import GuardOptions
from metalctl.server.models import Limits, ModelManager, ModelSpec, ServedModel
from metalctl.server.protocol import uvicorn_config
from tiny import build

VOCAB = 288
CONTEXT = 2048


def tiny_engine(seed: int = 0, tokenizer: Tokenizer | None = None, **config: Any) -> EngineThread:
    """A random model whose tokens are bytes, in its thread."""

    def load() -> LLMEngine:
        shape = {"model_type": "llama", "hidden_size": 64, "vocab_size": VOCAB}
        model = build("llama", seed, vocab_size=VOCAB)
        loaded = LoadedModel(model, tokenizer or byte_tokenizer(), shape, CONTEXT, f"tiny {seed}")
        settings = {"block_size": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 24, **config}
        return LLMEngine(loaded, EngineConfig(**settings))

    return EngineThread.start(load)


def served(name: str, thread: Any, slots: int = 512, size: int = 0) -> ServedModel:
    return ServedModel(name, thread, {"temperature": 1.0}, slots, thread.close, size)


@dataclass
class Running:
    url: str
    manager: ModelManager
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a coroutine function in the server's loop."""
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(30)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    @property
    def model(self) -> ServedModel:
        return self.manager.loaded()[0]


@contextlib.contextmanager
def running(
    load: Callable[[ModelSpec], ServedModel],
    *names: str,
    limits: Limits | None = None,
    options: GuardOptions | None = None,
    specs: list[ModelSpec] | None = None,
) -> Iterator[Running]:
    """A server with the models `names`, which `load` makes when they are asked for."""
    loop = asyncio.new_event_loop()
    manager = ModelManager(specs or [ModelSpec(name, name) for name in names], load, limits or Limits())
    config = uvicorn_config(create_app(manager, options), port=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield Running(f"http://{host}:{port}", manager, server, loop)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"


def assert_idle(server: Running) -> None:
    """Nothing is held: no place in a queue, no block, no sequence."""
    for _ in range(200):
        models = server.manager.loaded()
        if all(model.taken == 0 and not model.thread.engine.has_work for model in models):
            break
        threading.Event().wait(0.02)
    for model in server.manager.loaded():
        assert model.taken == 0
        engine = model.thread.engine
        assert engine.blocks.num_holders == 0
        assert all(pool.num_used == 0 for pool in engine.blocks.pools)
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
