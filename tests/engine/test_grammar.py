"""Structured output inside the batch: what a random model says fits the grammar, and nobody else is affected."""

import json
import random
import re

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
from byte_tokenizer import byte_tokenizer
from tokenizers import decoders, models, normalizers

from driving import assert_nothing_held, drain, text, tokens
from metalctl.engine import grammar as grammars
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import UsageError
from metalctl.engine.grammar import GrammarCompiler, Preamble
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.models.tokenizer import Tokenizer
from metalctl.engine.sequence import FinishReason, SamplingParams
from tiny import build

VOCAB = 288
TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCAB)


def engine(model, **config) -> LLMEngine:
    loaded = LoadedModel(model, TOKENIZER, {"vocab_size": VOCAB}, 4096, fingerprint="bytes")
    settings = {"block_size": 8, "max_num_batched_tokens": 16, "kv_cache_bytes": 1 << 24, **config}
    return LLMEngine(loaded, EngineConfig(**settings))


def ask(engine: LLMEngine, grammar: str | None, seed: int = 0, **params) -> str:
    compiled = None if grammar is None else COMPILER.compile(grammar)
    prompt = TOKENIZER.encode(f"say something {seed}")
    return engine.add_request(prompt, SamplingParams(seed=seed, **{"max_tokens": 300, **params}), grammar=compiled)


def test_random_model_writes_what_the_schema_describes(model):
    runner = engine(model)
    names = [ask(runner, grammars.json_schema(OBJECT), seed) for seed in range(8)]
    outputs = drain(runner)
    for name in names:
        value = json.loads(text(outputs[name]))
        assert set(value) == {"name", "count"}
        assert isinstance(value["count"], int)
        assert outputs[name][-1].finish_reason is FinishReason.STOP
    assert_nothing_held(runner)


def test_fifty_random_schemas_are_kept(model):
    schemas = [random_schema(random.Random(seed)) for seed in range(50)]
    runner = engine(model)
    names = [ask(runner, grammars.json_schema(schema), seed, max_tokens=900) for seed, schema in enumerate(schemas)]
    outputs = drain(runner)
    for name, schema in zip(names, schemas, strict=True):
        assert outputs[name][-1].finish_reason is FinishReason.STOP, (schema, text(outputs[name]))
        jsonschema_rs.validate(schema, json.loads(text(outputs[name])))


def random_schema(random: random.Random, depth: int = 0) -> dict:
    kinds = ["string", "integer", "number", "boolean", "null", "enum"] + ["object", "array"] * (3 if depth < 3 else 0)
    kind = random.choice(kinds if depth else ["object"])
    if kind == "enum":
        return {"enum": random.sample(["a", "two words", 3, None, True, "ünï"], 2)}
    if kind == "string":
        return {"type": "string", "maxLength": random.randint(0, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": random.randint(-50, 0), "maximum": random.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": -9, "maximum": 9}
    if kind == "array":
        return {"type": "array", "items": random_schema(random, depth + 1), "maxItems": random.randint(0, 3)}
    if kind == "object":
        names = random.sample(["a", "b", "long name", "ключ", 'q"uote'], random.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(random, depth + 1) for name in names},
            "required": names[: random.randint(0, len(names))],
            "additionalProperties": False,
        }
    return {"type": kind}


def test_regex_and_lark(model):
    runner = engine(model)
    pattern = r"[a-c]{3}-\d{2,4}"
    dated = ask(runner, grammars.regex(pattern))
    yes = ask(runner, grammars.lark('start: "yes" | "no" reason\nreason: " because " /[a-z]{1,5}/'))
    outputs = drain(runner)
    assert re.fullmatch(pattern, text(outputs[dated]))
    assert re.fullmatch(r"yes|no because [a-z]{1,5}", text(outputs[yes]))


def test_white_space_is_bounded(model):
    runner = engine(model)
    blank = TOKENIZER.encode(" ")[0]
    name = ask(runner, grammars.json_schema(OBJECT), logit_bias=((blank, 100.0),), max_tokens=60)
    said = text(drain(runner)[name])
    assert 16 * " " in said
    assert 17 * " " not in said


def test_others_in_the_batch_say_what_they_say_alone(model):
    alone = engine(model)
    name = ask(alone, None, seed=5, max_tokens=60)
    expected = tokens(drain(alone)[name])
    together = engine(model)
    free = ask(together, None, seed=5, max_tokens=60)
    bound = [ask(together, grammars.json_schema(OBJECT), seed) for seed in range(3)]
    outputs = drain(together)
    assert tokens(outputs[free]) == expected
    assert all(json.loads(text(outputs[name])) for name in bound)


def test_bound_request_says_the_same_alone_in_a_batch_and_after_preemption(model):
    alone = engine(model)
    name = ask(alone, grammars.json_schema(OBJECT), 3, max_tokens=100)
    expected = text(drain(alone)[name])
    crowded = engine(model, kv_cache_bytes=150_000, max_model_len=130)
    names = [ask(crowded, grammars.json_schema(OBJECT), seed, max_tokens=100) for seed in range(6)]
    outputs = drain(crowded)
    assert crowded.stats().preemptions
    assert text(outputs[names[3]]) == expected


def nested(depth: int) -> dict:
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema


def test_schema_without_end_is_refused():
    with pytest.raises(UsageError, match="recursion"):
        grammars.json_schema(nested(95))


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.regex("(" * 50_000 + "a" + ")" * 50_000),
        grammars.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
        grammars.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        grammars.json_schema({"enum": [str(number) for number in range(100_000)]}),
        grammars.json_schema({"type": "nonsense"}),
        grammars.json_schema({"type": "string", "pattern": "("}),
        grammars.json_schema({"$ref": "http://127.0.0.1/elsewhere"}),
        grammars.regex("("),
        grammars.lark("start: nobody"),
        grammars.lark("("),
    ],
)
def test_bad_grammar_is_refused(grammar):
    with pytest.raises((UsageError, grammars.GrammarError)):
        COMPILER.compile(grammar)


def test_fault_in_a_grammar_ends_its_request_only(model):
    runner = engine(model)
    good = ask(runner, grammars.json_schema(OBJECT), 1)
    free = ask(runner, None, 2, max_tokens=20)
    broken = COMPILER.compile(grammars.any_object())
    broken.advance = lambda token: 1 / 0
    runner.add_request(TOKENIZER.encode("x"), SamplingParams(max_tokens=50), "broken", grammar=broken)
    outputs = drain(runner, fail=False)
    assert isinstance(outputs["broken"][-1].error, ZeroDivisionError)
    assert json.loads(text(outputs[good]))
    assert outputs[free][-1].finish_reason is FinishReason.LENGTH
    assert_nothing_held(runner)


def test_what_the_grammar_allows_can_be_banned_and_then_the_request_fails(model):
    runner = engine(model)
    compiled = COMPILER.compile(grammars.regex("a"))
    params = SamplingParams(banned_token_ids=tuple(TOKENIZER.encode("a")), temperature=0)
    runner.add_request(TOKENIZER.encode("x"), params, "dead end", grammar=compiled)
    assert drain(runner, fail=False)["dead end"][-1].finish_reason is FinishReason.ERROR


def allowed(grammar) -> set[str]:
    mask = np.ones(VOCAB, bool)
    grammar.fill(mask)
    return {TOKENIZER.decode([int(token)], skip_special_tokens=False) for token in np.flatnonzero(mask)}


def is_free(grammar) -> bool:
    mask = np.zeros(VOCAB, bool)
    grammar.fill(mask)
    return bool(mask.all())


def test_reasoning_may_stand_before_the_text_and_is_free():
    tags = [TOKENIZER.backend.token_to_id(tag) for tag in ("<think>", "</think>")]
    grammar = COMPILER.compile(grammars.regex("[0-9]"), Preamble(*tags))
    assert allowed(grammar) == {*"0123456789", "<think>"}
    grammar.advance(tags[0])
    assert is_free(grammar)
    grammar.advance(ord("x"))
    assert not grammar.is_stopped
    grammar.advance(tags[1])
    assert allowed(grammar) == set("0123456789")
    grammar.advance(TOKENIZER.encode("7")[0])
    assert grammar.is_stopped


def test_text_may_begin_at_once_where_reasoning_is_possible():
    tags = [TOKENIZER.backend.token_to_id(tag) for tag in ("<think>", "</think>")]
    grammar = COMPILER.compile(grammars.regex("ab"), Preamble(*tags))
    grammar.advance(TOKENIZER.encode("a")[0])
    assert allowed(grammar) == {"b"}


def test_reasoning_that_the_prompt_opened_is_free_from_the_start():
    tags = [TOKENIZER.backend.token_to_id(tag) for tag in ("<think>", "</think>")]
    grammar = COMPILER.compile(grammars.regex("ab"), Preamble(*tags, opened=True))
    assert is_free(grammar)
    grammar.advance(tags[1])
    assert allowed(grammar) == {"a"}


def sentencepiece_tokenizer() -> Tokenizer:
    """A vocabulary that puts a space before a text, and spells what it does not know as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*'▁{}:,"abnme1', "▁{", "na", "me", "name", '▁"', '":', "▁1"]
    merges = [("▁", "{"), ("n", "a"), ("m", "e"), ("na", "me"), ("▁", '"'), ('"', ":"), ("▁", "1")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=[2])


@pytest.mark.parametrize("text", ['{"name": 1}', '{"name": "é日"}', '{"b": 1}'])
def test_vocabularies_that_put_a_space_first_may_write_as_they_do(text):
    tokenizer = sentencepiece_tokenizer()
    size = tokenizer.vocab_size
    grammar = GrammarCompiler(tokenizer, size).compile(grammars.any_object())
    for token in tokenizer.encode(text):
        mask = np.ones(size, bool)
        grammar.fill(mask)
        assert mask[token], tokenizer.backend.id_to_token(token)
        grammar.advance(token)
    assert grammar.is_stopped
