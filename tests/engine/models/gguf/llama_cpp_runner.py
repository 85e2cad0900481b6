"""Run by a Python that has llama-cpp-python: answers questions about GGUF files, one JSON object a line.

Input lines: {"path", "tokens": [...]} gives {"logits": [[...]]} of every position; {"path", "texts": [...],
"parse_special": bool} gives {"tokens": [[...]]}; {"path", "prompt": [...], "count": n} gives {"greedy": [...]}.
"""

import json
import sys

import llama_cpp
from llama_cpp import Llama


def open_model(request: dict) -> Llama:
    return Llama(
        request["path"],
        vocab_only="texts" in request,
        logits_all="tokens" in request,
        n_ctx=512,
        n_threads=1,
        verbose=bool(request.get("verbose")),
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        use_mmap=False,
    )


def answer(request: dict) -> dict:
    model = open_model(request)
    if "texts" in request:
        special = bool(request.get("parse_special"))
        encoded = [bytes.fromhex(text) for text in request["texts"]]
        return {"tokens": [model.tokenize(text, add_bos=False, special=special) if text else [] for text in encoded]}
    if "prompt" in request:
        tokens: list[int] = []
        for token in model.generate(request["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == request["count"]:
                break
        return {"greedy": tokens}
    model.eval(request["tokens"])
    return {"logits": model.scores[: len(request["tokens"])].tolist()}


for line in sys.stdin:
    try:
        result = answer(json.loads(line))
    except Exception as error:  # noqa: BLE001  whatever went wrong is the answer
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
