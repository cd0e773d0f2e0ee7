"""The routes of llama.cpp's server: its fields, its replies, and the same answers as from OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from serving import Running, serving
from test_chat_streams import said_in
from test_responses import Replayed
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from soothsay import LLM, FinishReason
from soothsay.server.access.api_keys import KeyRing, add_key
from soothsay.server.apis.llamacpp.llama_bodies import (
    FAMILIES,
    GapTokens,
    InfillRequest,
    LlamaCompletionRequest,
)
from soothsay.server.apis.llamacpp.llama_routes import LlamaFormat
from soothsay.server.fleet.jobs import AnswerProgress
from soothsay.server.generation.request_parameters import HEADER
from soothsay.server.http.json_streams import LINES
from soothsay.tokenizer import Tokenizer

PROMPT = "A man in a blue shirt"
FEW: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "n_predict": 12}
ODD = "\u00e1\U0001f98a"  # characters of several tokens


def post(running: Running, path: str, body: dict[str, Any], **changes: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json={**body, **changes}, timeout=60)


def told(running: Running, **changes: Any) -> Any:
    reply = post(running, "/completion", FEW, **changes)
    assert reply.status_code == 200, reply.text
    return reply.json()


def openai(running: Running, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
    reply = post(running, "/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(running: Running, **changes: Any) -> list[Any]:
    reply = post(running, "/completion", FEW, stream=True, **changes)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"  # so nginx passes on each chunk at once
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion(running: Running, path: str, sibyl: LLM) -> None:
    said, meant = post(running, path, FEW).json(), openai(running)
    assert sibyl.tokenizer is not None
    assert said["content"] == meant["choices"][0]["text"]
    assert (said["stop"], said["stop_type"], said["stopping_word"]) == (True, "limit", "")
    assert (said["index"], said["tokens"], said["truncated"]) == (0, [], False)
    assert (said["tokens_predicted"], said["tokens_evaluated"]) == (12, meant["usage"]["prompt_tokens"])
    assert said["prompt"] == sibyl.tokenizer.decode(sibyl.tokenizer.encode(PROMPT), skip_special=False)
    assert said["timings"]["predicted_n"] == 12
    settings = said["generation_settings"]
    assert (settings["n_predict"], settings["temperature"]) == (12, 0)
    assert said["model"] == "sibyl"


def test_a_stream(running: Running) -> None:
    changes = {"seed": 5, "temperature": 1.0, "stop": ["."], "n_predict": 40, "n_probs": 2}
    whole = told(running, **changes, return_tokens=True)
    *parts, last = events(running, **changes, timings_per_token=True)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [one for part in parts for one in part["tokens"]] == whole["tokens"]
    found = [one for part in parts for one in part.get("completion_probabilities", ())]
    assert found == whole["completion_probabilities"]
    assert {part["stop"] for part in parts} == {False}
    assert parts[-1]["timings"]["predicted_n"] > 0
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    assert {name: last[name] for name in ("stop_type", "stopping_word", "tokens_predicted")} == {
        name: whole[name] for name in ("stop_type", "stopping_word", "tokens_predicted")
    }


def test_why_an_answer_ended(running: Running) -> None:
    free = told(running, n_predict=60)["content"]
    word = free.split()[5]
    ended = told(running, n_predict=60, stop=["nowhere in it", word])
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", word)
    assert word not in ended["content"]
    choice = {"structured_outputs": {"choice": ["yes"]}}
    assert told(running, n_predict=-1, **choice)["stop_type"] == "eos"
    assert told(running, n_predict=-1, **choice, stop=["no"])["stopping_word"] == ""
    room = httpx.get(f"{running.url}/props").json()["default_generation_settings"]["n_ctx"]
    endless = told(running, prompt=[9] * (room - 40), n_predict=-1, ignore_eos=True, id_slot=0)
    assert (endless["stop_type"], endless["truncated"]) == ("limit", True)
    assert endless["tokens_predicted"] == 40
    nothing = told(running, n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)


def formatted(count: int, reason: FinishReason, **asked: Any) -> dict[str, Any]:
    """The reply with an answer of `count` tokens after 4 of a prompt, in a context of 10."""
    body = LlamaCompletionRequest(prompt="it", **asked)
    job: Any = Replayed(said_in(["x"] * count, reason))
    job.answers = [AnswerProgress(4, 0.0, num_output=count)]
    texts: Any = lambda token: "\u00e9\ufffd"[token % 2]  # noqa: E731
    form = LlamaFormat("it", texts, body, ["it"], 10)
    reply: Any = asyncio.run(form.collect(job))
    return dict(json.loads("".join(LINES.frame(reply))))


def test_only_an_answer_that_the_context_ends_is_truncated() -> None:
    cases = (6, FinishReason.LENGTH), (5, FinishReason.LENGTH), (6, FinishReason.STOP)
    assert [formatted(*case)["truncated"] for case in cases] == [True, False, False]


def test_a_part_of_a_character_has_no_bytes() -> None:
    probabilities = formatted(2, FinishReason.STOP, n_probs=1)["completion_probabilities"]
    assert [one["bytes"] for one in probabilities] == [[195, 169], []]


@pytest.mark.parametrize("text", ["yes", "yes\nno"])
def test_whether_an_answer_has_several_lines(running: Running, text: str) -> None:
    choice: dict[str, Any] = {"structured_outputs": {"choice": [text]}, "n_predict": -1}
    assert told(running, **choice)["has_new_line"] is ("\n" in text)
    assert events(running, **choice)[-1]["has_new_line"] is ("\n" in text)


def test_prompts_in_all_forms(running: Running, sibyl: LLM) -> None:
    tokenizer = sibyl.tokenizer
    assert tokenizer is not None
    ids, more = tokenizer.encode(PROMPT), tokenizer.encode(" and", special=False)
    plain, longer = told(running), openai(running, prompt=[ids + more])["choices"][0]["text"]
    same = ("content", "tokens_evaluated", "prompt")
    for prompt in (ids, {"prompt_string": PROMPT}, [PROMPT], [ids], [{"prompt_string": PROMPT}], [[PROMPT]]):
        found = told(running, prompt=prompt)
        assert {name: found[name] for name in same} == {name: plain[name] for name in same}
    for prompt in ([*ids, " and"], [PROMPT, *more], [[*ids, " and"]], [[PROMPT, " and"]], [*ids, "", " and"]):
        assert told(running, prompt=prompt)["content"] == longer
    many = told(running, prompt=[PROMPT, [*ids, " and"], {"prompt_string": PROMPT}])
    assert [one["content"] for one in many] == [plain["content"], longer, plain["content"]]
    assert [one["index"] for one in many] == [0, 1, 2]


def test_several_answers(running: Running) -> None:
    answers = told(running, n_cmpl=3, temperature=1, seed=9, prompt=[PROMPT, "Once"])
    assert len(answers) == 6
    assert len({answer["generation_settings"]["seed"] for answer in answers[:3]}) == 3
    assert [answer["prompt"].endswith(PROMPT) for answer in answers] == [True] * 3 + [False] * 3
    assert [answer["prompt"].endswith("Once") for answer in answers] == [False] * 3 + [True] * 3
    chunks = events(running, n_cmpl=3, temperature=1, seed=9)
    for index in range(3):
        text = "".join(chunk["content"] for chunk in chunks if chunk["index"] == index)
        assert text == answers[index]["content"]
    assert sum(chunk["stop"] for chunk in chunks) == 3


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temperature": 0.7, "seed": 4}, {"temperature": 0.7, "seed": 4}),
        ({"temperature": -1}, {"temperature": 0}),
        ({"temperature": 1, "top_k": 5, "seed": 4}, {"temperature": 1, "top_k": 5, "seed": 4}),
        ({"temperature": 1, "top_p": 0.6, "seed": 4}, {"temperature": 1, "top_p": 0.6, "seed": 4}),
        ({"temperature": 1, "min_p": 0.2, "seed": 4}, {"temperature": 1, "min_p": 0.2, "seed": 4}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"logit_bias": [[300, 100]]}, {"logit_bias": {"300": 100}}),
        ({"stop": ["sky", "shirt"]}, {"stop": ["sky", "shirt"]}),
        ({"speculation": False}, {}),
    ],
    ids=lambda one: next(iter(one), "plain"),
)
def test_options_reach_the_engine(running: Running, fields: dict[str, Any], meant: dict[str, Any]) -> None:
    assert told(running, **fields)["content"] == openai(running, **meant)["choices"][0]["text"]


def test_a_random_seed(running: Running) -> None:
    for seed in (-1, 2**32 - 1):
        seeds = {told(running, seed=seed)["generation_settings"]["seed"] for _ in range(2)}
        assert len(seeds) == 2


def test_forms(running: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    for form in (
        {"json_schema": schema},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        assert json.loads(told(running, n_predict=60, **form)["content"])["n"] in (1, 2)


def test_probabilities(running: Running) -> None:
    said = told(running, n_probs=3, return_tokens=True, prompt=f"{PROMPT} {ODD}")
    meant = openai(running, logprobs=3, prompt=f"{PROMPT} {ODD}")["choices"][0]["logprobs"]
    found = said["completion_probabilities"]
    assert [one["logprob"] for one in found] == meant["token_logprobs"]
    assert [one["token"] for one in found] == meant["tokens"]
    assert [one["id"] for one in found] == said["tokens"]
    assert all(len(one["top_logprobs"]) == 3 for one in found)
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in found if one["bytes"])
    assert "completion_probabilities" not in told(running, n_probs=0)


def test_chosen_fields(running: Running) -> None:
    wanted = ["content", "timings/predicted_n", "generation_settings/n_predict", "content/x", "nothing"]
    said = told(running, response_fields=wanted)
    assert said == {
        "content": told(running)["content"],
        "timings/predicted_n": 12,
        "generation_settings/n_predict": 12,
    }
    assert events(running, response_fields=["stop", "tokens_predicted"])[-1] == {
        "stop": True,
        "tokens_predicted": 12,
    }


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", ""),
    ({"prompt": []}, "prompt", "between 1 and"),
    ({"prompt": ["a"] * 65}, "prompt", "between 1 and 64"),
    ({"prompt": [1, [2]]}, "prompt", "put the token ids into a list"),
    ({"prompt": [1, 999_999]}, "prompt", "token ids of this model"),
    ({"prompt": [1, -1]}, "prompt", "token ids of this model"),
    ({"prompt": [1] * 5000}, "prompt", "more than the context"),
    ({"prompt": [1, *[""] * 5000]}, "prompt", "more than the context"),
    ({"prompt": "word " * 5000}, "prompt", "more than the context"),
    ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data", "reads text"),
    ({"n_predict": -3}, "n_predict", "n_predict"),
    ({"n_probs": 21}, "n_probs", "n_probs=21"),
    ({"n_cmpl": 17}, "n_cmpl", "n_cmpl=17"),
    ({"repeat_penalty": 99.0}, "repeat_penalty", "repeat_penalty"),
    ({"temperature": 9.0}, "temperature", "temperature"),
    ({"grammar": 'root ::= "x"'}, "grammar", "Lark"),
    ({"n_probs": 1, "post_sampling_probs": True}, "post_sampling_probs", "of the model itself"),
    ({"response_fields": ["x"] * 65}, "response_fields", ""),
    ({"response_fields": ["content/" + "/" * 256]}, "response_fields.0", "256 characters"),
    ({"top_pp": 1.0}, "top_pp", "did you mean top_p"),
    ({"stream": 5}, "stream", ""),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda one: str(one)[:30])
def test_refusals(running: Running, fields: dict[str, Any], param: str, message: str) -> None:
    reply = post(running, "/completion", FEW, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert str(error["param"]).startswith(param)
    assert message in error["message"]


def test_other_models_and_fields(running: Running) -> None:
    assert post(running, "/completion", FEW, model="other").status_code == 404
    reply = post(running, "/completion", FEW, mirostat=2, samplers=["top_k"], cache_prompt=True, id_slot=-1)
    assert reply.headers[HEADER] == "mirostat, samplers"
    assert reply.json()["content"] == told(running)["content"]


@pytest.fixture(scope="module")
def filling(sibyl: LLM) -> Iterator[tuple[Running, Tokenizer]]:
    """A server whose tokenizer has tokens for gaps, in the place of others."""
    assert sibyl.tokenizer is not None
    told = sibyl.tokenizer.backend.to_str()
    for old, new in zip(("<|user|>", "<|assistant|>", "<|system|>"), FAMILIES[0], strict=True):
        told = told.replace(old, new)
    tokenizer = Tokenizer(Backend.from_str(told), sibyl.tokenizer.templates, sibyl.tokenizer.special)
    with serving(partial(engines.sibyl, tokenizer=tokenizer)) as one:
        yield one, tokenizer


def test_an_infill(filling: tuple[Running, Tokenizer]) -> None:
    running, tokenizer = filling
    body = {"input_prefix": "def f(", "input_suffix": "):\n", "n_predict": 8, "temperature": 0}
    said = post(running, "/infill", body, prompt="x").json()
    vocabulary = tokenizer.vocabulary()
    prefix, suffix, middle = (vocabulary[name] for name in FAMILIES[0])
    before, after, begun = (tokenizer.encode(text, special=False) for text in ("def f(", "):\n", "x"))
    ids = [*tokenizer.encode(""), prefix, *before, suffix, *after, middle, *begun]
    assert said["tokens_evaluated"] == len(ids)
    assert said["content"] == openai(running, prompt=[ids], max_tokens=8)["choices"][0]["text"]
    error = post(running, "/v1/completions", {"prompt": "a", "suffix": "b"}).json()["error"]
    assert error["message"].startswith("suffix is not supported: use POST /infill")
    for mark in (prefix, suffix, middle):  # another gap begins
        ended = post(running, "/infill", body, logit_bias=[[mark, 100]]).json()
        assert (ended["stop_type"], ended["tokens_predicted"]) == ("eos", 1)
    extra = [{"filename": "a.py", "text": "import x"}]
    more = post(running, "/infill", body, input_extra=extra).json()
    assert "import x" in more["prompt"]
    assert more["prompt"].index("import x") < more["prompt"].index(FAMILIES[0][0])
    for missing in ("input_prefix", "input_suffix"):
        error = post(running, "/infill", body, **{missing: None}).json()["error"]
        assert error["param"] == missing


def test_a_model_that_cannot_fill_gaps(running: Running) -> None:
    reply = post(running, "/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert reply.status_code == 400
    assert "use /completion" in reply.json()["error"]["message"]
    error = post(running, "/v1/completions", {"prompt": "a", "suffix": "b"}).json()["error"]
    assert error["message"] == "suffix is not supported: this model continues a text at its end only"


def test_the_layout_of_infills() -> None:
    vocabulary = {name: number for number, name in enumerate((*FAMILIES[0], "<|repo_name|>", "<|file_sep|>"))}
    extra = [{"filename": "a.py", "text": "A"}, {"filename": "b.py", "text": "B"}]
    body = InfillRequest.model_validate(
        {"input_prefix": "pre", "input_suffix": "suf", "input_extra": extra, "prompt": "mid"}
    )
    tokens = GapTokens.of(vocabulary)
    assert tokens == GapTokens(0, 1, 2, 3, 4)
    assert (tokens.ends, GapTokens(0, 1, 2).ends) == ([0, 1, 2, 3, 4], [0, 1, 2])
    gap = [0, "pre", 1, "suf", 2, "mid"]
    files = [3, "project\n", 4, "a.py\nA\n", 4, "b.py\nB\n", 4, "file\n"]
    assert tokens.prompt(body) == ["", *files, *gap]
    assert GapTokens(0, 1, 2).prompt(body) == ["", "A\n", "B\n", *gap]
    alone = InfillRequest.model_validate({"input_prefix": "pre", "input_suffix": "suf", "prompt": "mid"})
    assert tokens.prompt(alone) == ["", *gap]
    assert GapTokens.of(dict.fromkeys(FAMILIES[0][:2], 0)) is None


def test_a_template(running: Running, sibyl: LLM) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    assert sibyl.tokenizer is not None
    prompt = post(running, "/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt == sibyl.tokenizer.render(messages)
    open_ended = {"messages": messages, "add_generation_prompt": False}
    shorter = post(running, "/apply-template", open_ended).json()["prompt"]
    assert shorter == sibyl.tokenizer.render(messages, add_generation_prompt=False) != prompt
    chat = {"messages": messages, "max_tokens": 12, "temperature": 0}
    said = post(running, "/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    assert told(running, prompt=prompt, add_special_tokens=False)["content"] == said
    assert post(running, "/apply-template", {"messages": []}).status_code == 400
    assert post(running, "/apply-template", {"messages": messages, "model": "x"}).status_code == 404


def test_the_token_that_begins_texts_is_added_unless_a_request_says_otherwise(sibyl: LLM) -> None:
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer = Tokenizer(backend, "{{ messages[0].content }}")
    text, chat = {"prompt": PROMPT, "max_tokens": 1}, [{"role": "user", "content": PROMPT}]
    plain = len(sibyl.tokenizer.encode(PROMPT))
    assert tokenizer.encode(PROMPT) == [0, *sibyl.tokenizer.encode(PROMPT)]
    with serving(partial(engines.sibyl, tokenizer=tokenizer)) as running:
        for path, body, default in (
            ("/completion", text, True),
            ("/v1/completions", text, True),
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}, False),  # templates write it
        ):
            for given, added in ((None, default), (True, True), (False, False)):
                told = post(running, path, body, add_special_tokens=given).json()
                read = told["tokens_evaluated"] if "usage" not in told else told["usage"]["prompt_tokens"]
                assert read == plain + added, (path, given)
        for body, added in (
            ({"prompt": PROMPT}, True),
            ({"prompt": PROMPT, "add_special_tokens": False}, False),
            ({"content": PROMPT}, False),
            ({"content": PROMPT, "add_special": True}, True),
            ({"messages": chat}, False),
        ):
            assert post(running, "/tokenize", body).json()["count"] == plain + added, body


def test_pieces(running: Running) -> None:
    body = {"content": f"fox {ODD}", "with_pieces": True}
    tokens = post(running, "/tokenize", body).json()["tokens"]
    assert [one["id"] for one in tokens] == post(running, "/tokenize", {"content": f"fox {ODD}"}).json()[
        "tokens"
    ]
    spelled = b"".join(
        one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in tokens
    )
    assert spelled.decode().strip() == f"fox {ODD}"
    assert any(isinstance(one["piece"], list) for one in tokens)


def test_slots(running: Running) -> None:
    slots = httpx.get(f"{running.url}/slots").json()
    assert len(slots) == httpx.get(f"{running.url}/props").json()["total_slots"]
    assert {name for slot in slots for name in slot} == {"id", "n_ctx", "speculative", "is_processing"}
    assert httpx.get(f"{running.url}/slots?fail_on_no_slot=1").status_code == 200
    body = {**FEW, "stream": True, "n_predict": -1, "ignore_eos": True, "n_cmpl": len(slots)}
    with httpx.stream("POST", f"{running.url}/completion", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        assert any(slot["is_processing"] for slot in httpx.get(f"{running.url}/slots").json())
        busy = httpx.get(f"{running.url}/slots?fail_on_no_slot=1")
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
        assert PROMPT not in httpx.get(f"{running.url}/slots").text
    running.wait_until(lambda: running.free)
    assert not any(slot["is_processing"] for slot in httpx.get(f"{running.url}/slots").json())


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice = {"authorization": f"Bearer {add_key(file, 'alice', requests_per_minute=2)}"}
    boss = {"authorization": f"Bearer {add_key(file, 'boss', operator=True)}"}
    with serving(engines.sibyl, KeyRing(file)) as running, httpx.Client(base_url=running.url) as client:
        for path in ("/completion", "/completions", "/infill", "/apply-template"):
            assert client.post(path, json=FEW).status_code == 401
        assert client.get("/slots").status_code == 401
        assert client.get("/slots", headers=alice).status_code == 403
        assert client.get("/slots", headers=boss).status_code == 200
        statuses = [client.post("/completion", json=FEW, headers=alice).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
