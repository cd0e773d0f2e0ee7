"""Clients of llama.cpp's, vLLM's and SGLang's servers: their fields, forms and routes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import Running

from soothsay import LLM
from soothsay.server.generation.request_parameters import HEADER

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "seed": 1, "max_tokens": 6}
COMPLETION: dict[str, Any] = {"prompt": "A man", "seed": 1, "max_tokens": 6}

LLAMA: dict[str, Any] = {
    **{"cache_prompt": True, "id_slot": 0, "n_keep": 0, "n_discard": 0, "n_indent": 0, "lora": []},
    **{"t_max_predict_ms": 0, "typical_p": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.0, "min_keep": 0},
    **{"dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1},
    **{"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1},
    **{"dry_sequence_breakers": ["\n"], "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
    **{"samplers": ["top_k"], "timings_per_token": True, "return_progress": True, "n_probs": 0},
    **{"reasoning_format": "auto", "parse_tool_calls": True, "grammar": "", "json_schema": None, "stop": []},
    **{"top_n_sigma": -1, "post_sampling_probs": False, "logit_bias": [], "n_predict": 100},
}
"""What clients of llama.cpp send with its defaults."""

VLLM: dict[str, Any] = {
    **{"best_of": None, "use_beam_search": False, "top_k": -1, "min_p": 0.0, "length_penalty": 1.0},
    **{"stop_token_ids": [], "include_stop_str_in_output": False, "min_tokens": 0, "prompt_logprobs": None},
    **{"echo": False, "add_generation_prompt": True, "documents": None, "chat_template": None},
    **{"structured_outputs": None, "priority": 0, "include_reasoning": True, "thinking_token_budget": None},
}
SGLANG: dict[str, Any] = {
    **{"regex": None, "ebnf": None, "no_stop_trim": False, "stream_reasoning": True, "lora_path": None},
    **{"session_params": None, "rid": "x", "return_hidden_states": False, "custom_logit_processor": None},
}


def ask(running: Running, body: dict[str, Any], **changes: Any) -> httpx.Response:
    path = "chat/completions" if "messages" in body else "completions"
    return httpx.post(f"{running.url}/v1/{path}", json={**body, **changes}, timeout=60)


@pytest.mark.parametrize("fields", [LLAMA, VLLM, SGLANG], ids=["llama.cpp", "vllm", "sglang"])
def test_their_defaults_change_nothing(running: Running, fields: dict[str, Any]) -> None:
    plain, told = ask(running, CHAT), ask(running, CHAT, **fields)
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == plain.json()["choices"]


def test_a_body_without_a_model(running: Running) -> None:
    assert ask(running, CHAT).json()["model"] == "sibyl"
    assert ask(running, COMPLETION).json()["model"] == "sibyl"
    assert ask(running, CHAT, model="other").status_code == 404


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_names_of_llama_cpp(running: Running, body: dict[str, Any]) -> None:
    body, limit = {**body, "ignore_eos": True}, {"max_tokens": None}
    assert ask(running, body, **limit, n_predict=3).json()["usage"]["completion_tokens"] == 3
    assert ask(running, body, n_predict=3).json()["usage"]["completion_tokens"] == 6  # ours win
    body = {**body, "max_tokens": 32}
    strong = ask(running, body, repeat_penalty=1.9).json()["choices"]
    assert strong == ask(running, body, repetition_penalty=1.9).json()["choices"]
    assert strong != ask(running, body).json()["choices"]
    assert ask(running, body, n_predict="x", max_tokens=None).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("unlimited", [{"max_tokens": -1}, {"max_tokens": None, "n_predict": -2}])
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_answers_without_a_limit(running: Running, body: dict[str, Any], unlimited: dict[str, int]) -> None:
    choice = ask(running, body, **unlimited, structured_outputs={"choice": ["yes " * 20]}).json()["choices"][
        0
    ]
    assert (choice.get("text") or choice["message"]["content"]) == "yes " * 20


def test_biases_in_pairs(running: Running, sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    one, other = (sibyl.tokenizer.encode(text, special=False)[-1] for text in (" river", " king"))
    forced = ask(running, CHAT, max_tokens=1, logit_bias=[[one, 100.0], [other, False]]).json()
    assert forced["choices"][0]["message"]["content"].strip() == "river"
    banned = ask(running, CHAT, max_tokens=1, logit_bias=[[one, False], [other, 100]]).json()
    assert banned["choices"][0]["message"]["content"].strip() == "king"
    for wrong in ([[one]], [one], [[one, "x"]], [["a", 1]], [[[], 1]], [[one, 1]] * 5000):
        assert ask(running, CHAT, logit_bias=wrong).json()["error"]["param"].startswith("logit_bias")


def test_schemas_in_their_places(running: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"const": 7}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for fields in (
        {"json_schema": schema},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"regex": '\\{"n": 7\\}'},
    ):
        said = ask(running, CHAT, max_tokens=40, **fields).json()["choices"][0]["message"]["content"]
        assert json.loads(said) == {"n": 7}
    assert ask(running, CHAT, response_format={"type": "json_object", "schema": 5}).status_code == 400
    assert "Lark" in ask(running, CHAT, grammar='root ::= "x"').json()["error"]["message"]
    assert "Lark" in ask(running, CHAT, ebnf='root ::= "x"').json()["error"]["message"]


def test_what_is_ignored_is_named(running: Running) -> None:
    told = ask(running, CHAT, cache_prompt=True, n_predict=3, repeat_last_n=64)
    assert told.headers[HEADER] == "cache_prompt, repeat_last_n"


def test_routes_of_llama_cpp(running: Running, sibyl: LLM) -> None:
    with httpx.Client(base_url=running.url) as client:
        props = client.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == sibyl.config.max_context
        assert props["model_alias"] == "sibyl"
        assert sibyl.tokenizer is not None
        assert props["chat_template"] == sibyl.tokenizer.templates["default"]
        assert client.get("/v1/health").json()["status"] == "ok"
        assert client.get("/models").json() == client.get("/v1/models").json()
        chats = {client.post(f"{base}/chat/completions", json=CHAT).text for base in ("/v1", "")}
        assert len(chats) == 2  # each has an id of its own
        assert all('"finish_reason":"length"' in chat for chat in chats)
        ids = client.post("/tokenize", json={"content": "A man", "with_pieces": False}).json()["tokens"]
        assert ids == sibyl.tokenizer.encode("A man", special=False)
        with_special = client.post("/tokenize", json={"content": "A man", "add_special": True}).json()[
            "tokens"
        ]
        assert with_special == sibyl.tokenizer.encode("A man")
        assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "A man"
        assert client.post("/tokenize", json={"content": "a", "prompt": "b"}).status_code == 400
