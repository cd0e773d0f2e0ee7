"""The files of a batch: what is read of hostile input, and what an output may be when a batch goes on."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soothsay import RequestError
from soothsay.server.batch.batch_files import MAX_LINE, BatchInput, BatchLine, BatchOutput, read_line
from soothsay.server.batch.batch_run import settle

STATE = {"seed": 1, "context": None}


def entry(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}, **changes}


def written(path: Path, *lines: Any) -> Path:
    """A file of lines: bytes as they are, all else as JSON."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def all_lines(path: Path) -> list[BatchLine]:
    requests = BatchInput(path)
    return list(requests.lines(np.ones(len(requests.keys), bool)))


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b"{", 400, "line 7: the text is not valid JSON"),
        (b'{"custom_id": \n', 400, "line 7: the text is not valid JSON: Expecting value at character 16"),
        (b'{"custom_id": "\xff"}', 400, "line 7: the text is not UTF-8"),
        (b"[" * 100_000, 400, "more than 32768 fields"),
        (b'{"custom_id": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested deeper than 64"),
        (b"[" + b"{}," * 40_000 + b"{}]", 400, "more than 32768 fields"),
        (b"[]", 400, "line 7: give a JSON object"),
        (b"{}", 400, "line 7: custom_id: it is missing"),
        (json.dumps(entry(5)).encode(), 400, "line 7: custom_id: it must be a string"),
        (json.dumps(entry("")).encode(), 400, "line 7: custom_id"),
        (json.dumps(entry("x" * 513)).encode(), 400, "line 7: custom_id"),
        (b'{"custom_id": "a", "custom_id": "b"}', 400, "custom_id: the field is given twice"),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', 400, "NaN is not a value of JSON"),
        (b'{"custom_id": "\\ud800"}', 400, "half of a character"),
        (None, 413, f"line 7: the line is longer than {MAX_LINE} bytes"),
    ],
    ids=range(15),
)
def test_what_is_no_request_has_an_error_and_its_number(raw: bytes | None, status: int, message: str) -> None:
    line = read_line(7, raw)
    assert line.error is not None
    assert (line.error.status, line.custom_id) == (status, None)
    assert message in line.error.message
    assert line.key != read_line(8, raw).key


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"method": "GET"}, 405, "method"),
        ({"method": None}, 405, "method"),
        ({"method": ["POST"]}, 405, "method"),
        ({"url": "/v1/nothing"}, 404, "url"),
        ({"url": "/v1/messages"}, 404, "url"),
        ({"url": "/api/chat"}, 404, "url"),
        ({"url": {"a": 1}}, 404, "url"),
        ({"body": None}, 400, "body"),
        ({"body": {"stream": True}}, 400, "stream"),
    ],
)
def test_other_errors_name_the_request(changes: dict[str, Any], status: int, param: str) -> None:
    line = read_line(7, json.dumps(entry(**changes)).encode())
    assert line.error is not None
    assert (line.error.status, line.error.param, line.custom_id) == (status, param, "a")


def test_an_error_names_no_path_that_is_refused_later() -> None:
    error = read_line(1, json.dumps(entry(url="/v1/messages")).encode()).error
    assert error is not None
    assert error.message == "url must be one of /v1/chat/completions, /v1/completions, /v1/responses"
    assert (
        read_line(1, json.dumps(entry(url="/v1/embeddings")).encode()).error is None
    )  # the server refuses it


def test_lines_are_counted_as_editors_do(tmp_path: Path) -> None:
    path = written(
        tmp_path / "in", b"\xef\xbb\xbf" + json.dumps(entry("a")).encode(), b"", b" \t\r", entry("b")
    )
    path.write_bytes(path.read_bytes() + json.dumps(entry("c\u2028")).encode())  # without an end
    assert [(line.number, line.custom_id) for line in all_lines(path)] == [(1, "a"), (4, "b"), (5, "c\u2028")]


def test_long_lines_are_never_held(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        file.write(json.dumps(entry("before")).encode() + b'\n{"custom_id": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + json.dumps(entry("after")).encode())
    tracemalloc.start()
    lines = all_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.custom_id for line in lines] == ["before", None, "after"]
    assert lines[1].error is not None
    assert lines[1].error.status == 413
    assert peak < 4 * MAX_LINE


def test_many_lines_take_little_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "in", *(entry(f"id-{index}") for index in range(5000)))
    BatchInput(path)
    tracemalloc.start()
    requests = BatchInput(path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(requests.keys) == 5000
    assert held < 5000 * 20


def test_double_ids_are_named_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "in", entry("a"), b"", entry("b"), b"?", entry("a"), entry("c"))
    with pytest.raises(RequestError, match=r"has the custom_id 'a' in line 1 and again in line 5; give each"):
        BatchInput(path)
    written(path, entry("b"), entry("x" * 500), entry("x" * 500, url="/v1/nothing"), entry("b"))
    with pytest.raises(
        RequestError, match=r"x \.\.\.' in line 2 and again in line 3 \(lines with a used id: 2\)"
    ):
        BatchInput(path)


def test_input_that_cannot_be_read_twice(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null"), tmp_path / "missing"):
        with pytest.raises(RequestError, match=r"is not a file|there is no file"):
            BatchInput(path)


def test_input_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "in", entry("a"), entry("b"), entry("c"))
    for changed in ([entry("a")], [entry("a"), entry("x"), entry("c")]):
        written(path, entry("a"), entry("b"), entry("c"))
        requests = BatchInput(path)
        written(path, *changed)
        lines = requests.lines([False, True, True])
        with pytest.raises(RequestError, match="was changed while the batch ran"):
            list(lines)


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """An output with three answers, of which one failed."""
    with BatchOutput(tmp_path / "out") as output:
        output.begin(STATE)
        for index, status in enumerate((200, 404, 200)):
            line = read_line(index, json.dumps(entry(f'"a\\{index}\n\u2028')).encode())
            output.write(line, status, {"text": '","error":null}\n', "status_code": 200})
    return tmp_path / "out"


def test_answers_are_found_again(answered: Path) -> None:
    lines = [json.loads(line) for line in answered.read_text().splitlines()]  # as readers split it
    assert [line["custom_id"] for line in lines] == [f'"a\\{index}\n\u2028' for index in range(3)]
    assert [line["response"]["status_code"] for line in lines] == [200, 404, 200]
    with BatchOutput(answered) as output:
        assert (len(output.keys), [*output.failures]) == (3, [output.keys[1]])
        assert [f"batch_req_{key:016x}" for key in output.keys] == [line["id"] for line in lines]


def test_a_line_that_the_system_takes_in_parts_is_whole(
    answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:50]))
    with BatchOutput(answered) as output:
        output.write(read_line(7, json.dumps(entry("last")).encode()), 200, {"text": "x" * 200})
    last = json.loads(answered.read_bytes().splitlines()[-1])
    assert (last["custom_id"], last["response"]["body"]) == ("last", {"text": "x" * 200})


def test_a_torn_line_is_dropped_wherever_it_is_torn(answered: Path) -> None:
    whole = answered.read_bytes()
    before = whole.rfind(b"\n", 0, len(whole) - 1) + 1
    for end in range(before, len(whole)):
        answered.write_bytes(whole[:end])
        with BatchOutput(answered) as output:
            assert len(output.keys) == 2
        assert answered.read_bytes() == whole[:before]
    answered.write_bytes(whole + b"\0" * 5000)  # as after a loss of power
    with BatchOutput(answered) as output:
        assert len(output.keys) == 3
    assert answered.read_bytes() == whole


@pytest.mark.parametrize("line", [b"", b"{}", b"hello", b'{"id":"batch_req_0000000000000000"}'])
def test_other_lines_are_never_overwritten(answered: Path, line: bytes) -> None:
    content = line + b"\n" + answered.read_bytes()
    answered.write_bytes(content)
    with pytest.raises(RequestError, match=r"line 1 of .* is not an answer of a batch"):
        BatchOutput(answered)
    assert answered.read_bytes() == content


def test_an_output_needs_its_state(answered: Path) -> None:
    state, content = answered.with_name("out.state"), answered.read_bytes()
    for wrong in (b"", b"[", b"[]", b"{}", b"[" * 1000, b'{"a": "' + b"x" * 2**17):
        state.write_bytes(wrong)
        with pytest.raises(RequestError, match=r"out\.state (cannot be read|is not the state of a batch)"):
            BatchOutput(answered)
    state.unlink()
    with pytest.raises(RequestError, match=r"there is no out\.state that says how it was made"):
        BatchOutput(answered)
    assert answered.read_bytes() == content


def test_another_state_is_refused_until_there_are_no_answers(answered: Path) -> None:
    with BatchOutput(answered) as output:
        output.check({"seed": 1})
        output.begin(STATE)
        with pytest.raises(RequestError, match="begun with another seed: 1, and now it is 2"):
            output.check({"seed": 2})
        with pytest.raises(RequestError, match="begun with another numbers: None, and now it is x"):
            output.begin({**STATE, "numbers": "x"})
    answered.unlink()
    with BatchOutput(answered) as output:
        output.begin({"seed": 2})
    assert json.loads(answered.with_name("out.state").read_text()) == {"seed": 2}


def test_one_process_writes_an_output(answered: Path) -> None:
    with BatchOutput(answered), pytest.raises(RequestError, match="another process writes"):
        BatchOutput(answered)
    with BatchOutput(answered):
        pass


def test_outputs_that_are_no_files(tmp_path: Path) -> None:
    for path in (Path("/dev/full"), tmp_path, tmp_path / "no" / "out", Path("/proc/out")):
        with pytest.raises(RequestError, match=r"is not a file|cannot be written|no folder"):
            BatchOutput(path)


def test_answers_must_belong_to_the_input(tmp_path: Path) -> None:
    requests = BatchInput(written(tmp_path / "in", entry("a"), entry("b")))
    a, b = requests.keys
    assert requests.unanswered(np.array([b], np.uint64)).tolist() == [True, False]
    for keys in ([a, a], [a, 5], [5]):
        with pytest.raises(RequestError, match="two answers to one line"):
            requests.unanswered(np.array(keys, np.uint64))


def test_replies_lose_what_depends_on_the_run() -> None:
    def reply(chance: str, number: int) -> dict[str, Any]:
        call = {"id": f"call_{chance}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return {
            "id": f"chatcmpl-{chance}",
            "created": number,
            "choices": [
                {"message": {"content": None, "tool_calls": [call, {**call, "id": chance}]}, "seed": 3}
            ],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": number},
                "completion_tokens_details": {"accepted_prediction_tokens": number},
                "speculation": {"drafted": number},
            },
            "metrics": {"speculative_decoding": number},
            "timings": {"prompt_ms": number},
        }

    one, same, other = (
        settle(reply("1" * 9, 1), "k"),
        settle(reply("2" * 9, 2), "k"),
        settle(reply("1" * 9, 1), "j"),
    )
    assert one == same
    assert one["usage"] == {"prompt_tokens": 5, "completion_tokens": 2}
    assert (one["created"], one["choices"][0]["seed"]) == (0, 3)
    assert one.keys() == {"id", "created", "choices", "usage"}
    calls = one["choices"][0]["message"]["tool_calls"]
    ids = [one["id"], calls[0]["id"], calls[1]["id"]]
    assert [len(found) for found in ids] == [18, 14, 9]
    assert ids[0].startswith("chatcmpl-")
    assert ids[1].startswith("call_")
    assert ids[1][5:] != ids[2]
    assert other["id"] != one["id"]
