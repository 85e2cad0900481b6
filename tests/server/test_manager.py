"""Which models are loaded: on demand, within limits, and no longer than they are wanted."""

import asyncio
import gc
import weakref

import pytest
from scripted import ScriptedThread
from serving import running, served, tiny_engine

from metalctl.engine.errors import HubError, ModelNotFoundError, OutOfMemoryError
from metalctl.server.errors import ApiError
from metalctl.server.models import FOR_EVER, Limits, ModelManager, ModelSpec


class Loader:
    """Makes models from nothing, and keeps a diary."""

    def __init__(self, size: int = 0, failures: dict[str, list[Exception]] | None = None):
        self.diary: list[str] = []
        self.size = size
        self.failures = failures or {}

    def __call__(self, spec: ModelSpec):
        if self.failures.get(spec.name):
            raise self.failures[spec.name].pop(0)
        self.diary.append(f"+{spec.name}")
        model = served(spec.name, ScriptedThread("hi"), size=spec.size)
        model.close = lambda: self.diary.append(f"-{spec.name}")
        return model


def manager(loader: Loader, *names: str, pinned: str = "", **limits) -> ModelManager:
    specs = [ModelSpec(name, f"owner/{name}", loader.size, name == pinned) for name in names]
    return ModelManager(specs, loader, Limits(**limits))


async def touch(models: ModelManager, *names: str) -> None:
    for name in names:
        async with models.use(name) as model:
            assert model.name == name


def test_models_are_loaded_when_they_are_asked_for_and_once():
    async def run():
        models = manager(loader := Loader(), "a", "b", max_loaded=2)
        await touch(models, "a", "a", "b", "a")
        assert loader.diary == ["+a", "+b"]
        await models.close()
        assert loader.diary == ["+a", "+b", "-a", "-b"]

    asyncio.run(run())


def test_the_model_not_used_for_longest_goes():
    async def run():
        models = manager(loader := Loader(), "a", "b", "c", max_loaded=2)
        await touch(models, "a", "b", "a", "c")
        assert loader.diary == ["+a", "+b", "-b", "+c"]

    asyncio.run(run())


def test_pinned_models_stay():
    async def run():
        models = manager(loader := Loader(), "a", "b", "c", pinned="a", max_loaded=2, keep_alive=0.01)
        await touch(models, "a", "b", "c", "b")
        assert "-a" not in loader.diary
        await asyncio.sleep(0.1)
        assert "-a" not in loader.diary
        assert models.expires_in("a") == FOR_EVER

    asyncio.run(run())


def test_weights_stay_within_the_budget():
    async def run():
        models = manager(loader := Loader(size=60), "a", "b", "c", max_loaded=3, memory=130)
        await touch(models, "a", "b", "c")
        assert loader.diary == ["+a", "+b", "-a", "+c"]

    asyncio.run(run())


def test_idle_models_are_unloaded_and_come_back():
    async def run():
        models = manager(loader := Loader(), "a", keep_alive=0.05)
        await touch(models, "a")
        await asyncio.sleep(0.02)
        await touch(models, "a")
        await asyncio.sleep(0.03)
        assert loader.diary == ["+a"]
        await asyncio.sleep(0.1)
        assert loader.diary == ["+a", "-a"]
        await touch(models, "a")
        assert loader.diary[-1] == "+a"

    asyncio.run(run())


def test_a_model_that_is_unloaded_leaves_the_memory():
    async def run():
        models = ModelManager([ModelSpec("a", "a")], lambda spec: served("a", tiny_engine()), Limits())
        async with models.use("a", keep_alive=0) as model:
            network = weakref.ref(model.thread.engine.runner.model)
        del model
        for _ in range(200):
            if not models.loaded() and network() is None:
                break
            await asyncio.sleep(0.02)
        assert network() is None

    gc.disable()  # nothing but the unloading may collect it
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_request_sets_how_long_its_model_stays():
    async def run():
        models = manager(loader := Loader(), "a")
        async with models.use("a", keep_alive=0):
            await asyncio.sleep(0.05)
            assert loader.diary == ["+a"]
        await asyncio.sleep(0.05)
        assert loader.diary == ["+a", "-a"]

    asyncio.run(run())


def test_a_model_in_use_is_waited_for():
    async def run():
        models = manager(loader := Loader(), "a", "b", patience=5)

        async def hold():
            async with models.use("a"):
                await asyncio.sleep(0.1)
                loader.diary.append("done with a")

        holding = asyncio.ensure_future(hold())
        await asyncio.sleep(0.02)
        await touch(models, "b")
        await holding
        assert loader.diary == ["+a", "done with a", "-a", "+b"]

    asyncio.run(run())


def test_waiting_has_an_end():
    async def run():
        models = manager(Loader(), "a", "b", patience=0.05)
        async with models.use("a"):
            with pytest.raises(ApiError) as caught:
                await touch(models, "b")
        assert caught.value.status == 503
        assert "retry-after" in caught.value.headers

    asyncio.run(run())


def test_what_does_not_fit_is_tried_again_with_more_room():
    async def run():
        loader = Loader(failures={"b": [OutOfMemoryError("too large")]})
        models = manager(loader, "a", "b", max_loaded=2)
        await touch(models, "a", "b")
        assert loader.diary == ["+a", "-a", "+b"]

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_can_be_asked_for_again():
    async def run():
        loader = Loader(failures={"a": [HubError("down"), OutOfMemoryError("x"), OutOfMemoryError("x")]})
        models = manager(loader, "a", "b", max_loaded=2)
        for error in (HubError, OutOfMemoryError, OutOfMemoryError):
            with pytest.raises(error):
                await touch(models, "a")
        await touch(models, "a")

    asyncio.run(run())


def test_many_at_once_load_a_model_once():
    async def run():
        models = manager(loader := Loader(), "a", "b", max_loaded=2)
        await asyncio.gather(*(touch(models, "a", "b") for _ in range(50)))
        assert sorted(loader.diary) == ["+a", "+b"]

    asyncio.run(run())


def test_models_are_found_by_name_reference_and_ollamas_tag():
    models = manager(Loader(), "a", "b")
    assert models.find(None).name == "a"
    for name in ("b", "owner/b", "b:latest"):
        assert models.find(name).name == "b"
    with pytest.raises(ModelNotFoundError) as caught:
        models.find("c")
    assert caught.value.hint == "There are: a, b."


def test_answers_come_from_the_model_that_was_asked_for():
    def load(spec):
        return served(spec.name, ScriptedThread(f"I am {spec.name}"))

    with running(load, "a", "b", limits=Limits(max_loaded=2)) as server, server.client() as client:
        for name in ("b", "a", "b"):
            answer = client.post("/v1/completions", json={"model": name, "prompt": "who?", "max_tokens": 99}).json()
            assert answer["choices"][0]["text"] == f"I am {name}"
            assert answer["model"] == name
        models = client.get("/v1/models").json()["data"]
        assert [(model["id"], model["loaded"]) for model in models] == [("a", True), ("b", True)]


def test_failure_to_load_says_what_kind_and_no_more():
    def load(spec):
        raise OutOfMemoryError("the cache for one sequence does not fit: 12 of /dev/memory")

    with running(load, "a") as server:
        answer = server.client().post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "memory" in answer.json()["error"]["message"]
        assert "/dev" not in answer.text
