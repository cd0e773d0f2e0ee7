"""The command line: what it prints and where, its exit codes, and that no drafter changes an answer."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from rich.console import Console
from typer.testing import CliRunner, Result

import soothsay
from soothsay import LLM, RequestError, SamplingParams, SoothsayError, Stream
from soothsay.bench.prompts import DEMO, read_prompts
from soothsay.cli import demo_command as demo_module
from soothsay.cli.app import app
from soothsay.cli.chat_command import Conversation
from soothsay.cli.demo_command import DemoAnswer
from soothsay.cli.generate_command import _write
from soothsay.core.answer import Piece
from soothsay.corpus import PromptEntry
from soothsay.server.tools.reasoning import ReasoningFormat

PROMPT = "A man in a blue shirt is standing"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
TASKS = read_prompts(DEMO)
GREEN = "\x1b[32m"
RAW = ("generate", "-m", "sibyl", "--raw", "-t", "0")
CHAT = ("generate", "-m", "sibyl", "--chat", "-t", "0")
LOOPING = "Can you explain why the sky is blue?"  # an answer that repeats itself, so that guesses are right


def run(*args: str, stdin: str | bytes | None = None, **env: str) -> Result:
    """Run a command in this process. Lines are wide, so that no message is wrapped."""
    return CliRunner().invoke(app, args, input=stdin, env={"COLUMNS": "200", **env})


def main(*args: str) -> list[str]:
    """The command line of a process that runs a command."""
    return [sys.executable, "-m", "soothsay", *args]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("sibyl", drafter="none", max_requests=1)


@pytest.fixture
def conversation(llm: LLM) -> Conversation:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    return Conversation(llm, GREEDY, "prompt-lookup", console)


def printed(conversation: Conversation) -> str:
    assert isinstance(conversation.console.file, io.StringIO)
    return conversation.console.file.getvalue()


# generate


def test_generate_says_what_the_api_says_with_any_drafter(llm: LLM) -> None:
    """The drafters here stand for each way to name one; tests/test_guarantee.py has all drafters."""
    text = llm.generate(PROMPT, GREEDY).text
    for drafter in ("none", "mtp", "draft-model(model=sibyl)", "suffix > prompt-lookup"):
        result = run(*RAW, PROMPT, "--max-tokens", "24", "--drafter", drafter)
        assert (result.exit_code, result.stdout, result.stderr) == (0, text, ""), drafter


def test_generate_samples_as_the_api_does(llm: LLM) -> None:
    options = ["--temperature", "1", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01", "--seed", "5"]
    params = replace(GREEDY, temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=5)
    assert run("generate", "--raw", PROMPT, "-n", "24", *options).stdout == llm.generate(PROMPT, params).text


def test_generate_reads_stdin_and_files(llm: LLM, tmp_path: Path) -> None:
    text = llm.generate(PROMPT, GREEDY).text
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\r\n")
    assert run(*RAW, "-n", "24", stdin=PROMPT).stdout == text
    assert run(*RAW, "-", "-n", "24", stdin=f"{PROMPT}\n").stdout == text
    assert run(*RAW, "-n", "24", "--file", str(file)).stdout == text


def test_generate_in_the_chat_template(llm: LLM) -> None:
    text = llm.chat([{"role": "user", "content": LOOPING}], GREEDY).text
    assert not text.endswith("\n")
    assert run(*CHAT, LOOPING, "-n", "24").stdout == f"{text}\n"
    assert run("generate", "-t", "0", LOOPING, "-n", "24").stdout == f"{text}\n"  # the model has a template
    assert run(*RAW, LOOPING, "-n", "24").stdout == llm.generate(LOOPING, GREEDY).text != text


def test_generate_in_the_template_of_a_file(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[0].content }}")
    text = llm.generate(PROMPT, GREEDY).text
    assert run(*CHAT, PROMPT, "-n", "24", "--chat-template", str(file)).stdout == f"{text}\n"


@pytest.mark.parametrize(
    ("texts", "exact", "expected"),
    [
        (("One.",), False, "One.\n"),
        (("One.\n", ""), False, "One.\n"),
        (("One.",), True, "One."),
        ((), False, ""),
    ],
)
def test_generate_ends_a_line_once(
    texts: tuple[str, ...], exact: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: Any = [SimpleNamespace(text=text) for text in texts]
    _write(pieces, exact=exact)
    assert capsys.readouterr().out == expected


def test_generate_has_written_its_line_before_it_tells_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe, write_through=False))
    pieces: Any = [SimpleNamespace(text="One.")]
    _write(pieces, exact=False)
    assert pipe.getvalue() == b"One.\n"


def test_generate_stops_at_any_of_the_strings(llm: LLM) -> None:
    text = llm.generate(PROMPT, GREEDY).text
    first, second = text[5:8], text[12:15]
    result = run(*RAW, PROMPT, "-n", "24", "--stop", second, "--stop", first)
    assert result.stdout == text[: min(text.find(first), text.find(second))]


def test_generate_names_chats_where_a_model_ends_at_once(llm: LLM) -> None:
    ends_at_once = llm.generate(PROMPT, GREEDY).text[:1]
    result = run(*RAW, PROMPT, "-n", "24", "--stop", ends_at_once)
    assert result.stdout == ""
    assert "it is made for chats: try --chat" in result.stderr
    assert run(*CHAT, LOOPING, "-n", "4").stderr == ""


def test_generate_puts_stats_on_stderr(llm: LLM) -> None:
    result = run(*CHAT, LOOPING, "-n", "48", "-d", "suffix + mtp", "--stats")
    params = replace(GREEDY, max_tokens=48)
    assert result.stdout == llm.chat([{"role": "user", "content": LOOPING}], params).text + "\n"
    assert re.search(r"48 tokens in [\d.]+ s, \d+ tokens/s; \d+ steps, [\d.]+ tokens a step", result.stderr)
    assert re.search(r"accepted by depth: \d+% .*; by drafter: (suffix|mtp) \d+", result.stderr)
    assert "ended by length" in result.stderr
    plain = run("generate", PROMPT, "-n", "4", "-d", "none", "-t", "1", "--seed", "3", "--stats").stderr
    assert "nothing was drafted" in plain
    assert "seed 3" in plain


def test_models_defaults_hold_where_no_option_is_given(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.9, "top_k": 3}')
    own = replace(GREEDY, temperature=0.9, top_k=3, seed=5)
    sampled = llm.generate(PROMPT, own).text
    options = ["-n", "24", "--seed", "5", "--generation-config", str(tmp_path)]
    assert run("generate", "--raw", PROMPT, *options).stdout == sampled != llm.generate(PROMPT, GREEDY).text
    more = llm.generate(PROMPT, replace(own, top_k=0)).text
    assert run("generate", "--raw", PROMPT, *options, "--top-k", "0").stdout == more != sampled
    greedy = llm.chat([{"role": "user", "content": LOOPING}], replace(own, temperature=0.0)).text
    told = run("chat", "-t", "0", *options, stdin=LOOPING).stdout
    assert "\ndefaults of the model: temperature 0.9, top_k 3\n" in told
    assert greedy in told
    none = run("chat", "-t", "0", "-n", "4", "--generation-config", "none", stdin=LOOPING)
    assert "defaults" not in none.stdout
    refused = run("generate", PROMPT, "--model", "nowhere", "--top-p", "2")
    assert (refused.exit_code, "top_p=2.0 is not possible" in refused.stderr) == (2, True)


def test_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen(
        main("generate", "--chat", LOOPING), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert b"rror" not in process.stderr.read()  # a slow machine tells there what it loads
    process.stderr.close()
    process.wait()


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Stream) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "_next", interrupted)
    result = run("generate", PROMPT, "-m", "sibyl")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("command", "model"),
    [(["generate", PROMPT, "-n", "2"], ["-m"]), (["chat", "-n", "2"], []), (["inspect"], [])],
)
def test_the_bundled_model_is_told_where_no_model_is_named(command: list[str], model: list[str]) -> None:
    told = run(*command, stdin="Hello!")
    assert told.stderr.startswith("no model is named: this is sibyl, a tiny one for demonstrations; ")
    assert told.stderr.endswith(" smollm2\n")
    named = run(*command, *model, "sibyl", stdin="Hello!")
    assert (told.exit_code, named.exit_code, named.stderr) == (0, 0, "")


@pytest.mark.parametrize("module", ["soothsay.cli.app", "soothsay.options", "soothsay.errors"])
def test_ctrl_c_ends_quietly_while_commands_are_imported(module: str) -> None:
    press = f"""
import runpy, signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
runpy.run_module("soothsay", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", press], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


# chat


def test_chat_remembers_and_obeys(llm: LLM) -> None:
    said = [{"role": "user", "content": "Hello!"}]
    first = llm.chat(said, GREEDY).text
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": LOOPING}]
    second = llm.chat(said, GREEDY).text
    pirate = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": LOOPING}]
    third = llm.chat(pirate, GREEDY).text
    lines = ["Hello!", LOOPING, "", "/reset", "/system You are a pirate.", LOOPING, "/quit", "never read"]
    result = run("chat", "-t", "0", "-n", "24", stdin="\n".join(lines))
    assert result.exit_code == 0
    numbers = r"\n\d+ tokens in [\d.]+ s, \d+ tokens/s; \d+ steps, [\d.]+ tokens a step[^\n]*\n"
    answers = [re.escape(first), re.escape(second), "forgotten\nsystem message set\n" + re.escape(third)]
    assert re.search(numbers.join([*answers, "$"]), result.stdout)


def test_chat_ends_with_its_input() -> None:
    assert run("chat", stdin="/help").exit_code == 0


def test_chat_commands_change_what_follows(conversation: Conversation) -> None:
    conversation.handle("/temperature 0.5")
    conversation.handle("/drafter draft-model(model=sibyl, depth=2)")
    assert conversation.params.temperature == 0.5
    conversation.handle("/temperature 0")
    conversation.handle("Hello!")
    conversation.handle("/stats")
    assert "accepted by depth: 100% 100%" in printed(conversation)  # the sibyl knows what it will say
    conversation.handle("/system Be brief.")
    conversation.handle("/system")
    assert conversation.system == ""
    assert "no system message" in printed(conversation)
    conversation.handle("/help")
    assert all(f"\n{name}" in printed(conversation) for name in ("/reset", "/drafter SPEC", "/quit"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature warm", "/temperature needs a number, not 'warm'"),
        ("/temperature -1", "temperature=-1.0 is not possible"),
        ("/drafter bogus", "drafter 'bogus' is unknown"),
        ("/drafter draft-model(model=nowhere)", "no model at 'nowhere'"),
        ("/stats", "there is none yet"),
        ("/jump", "there is no command /jump"),
    ],
)
def test_chat_survives_mistakes(conversation: Conversation, line: str, message: str) -> None:
    with pytest.raises(SoothsayError, match=message):
        conversation.handle(line)
    result = run("chat", "sibyl", "-t", "0", "-n", "2", stdin=f"{line}\nHello!\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "2 tokens in" in result.stdout


def test_chat_colours_what_was_drafted(conversation: Conversation) -> None:
    conversation.params = replace(GREEDY, max_tokens=48)
    conversation.handle(LOOPING)
    assert GREEN not in printed(conversation)
    conversation.handle("/reset")
    conversation.handle("/colour")
    conversation.handle(LOOPING)
    assert GREEN in printed(conversation)
    assert (
        GREEN in run("chat", "-t", "0", "-n", "48", "--show-drafted", stdin=LOOPING, FORCE_COLOR="1").stdout
    )


def test_chat_shows_markdown_unless_it_colours(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Said(list[Piece]):
        choice = conversation.llm.generate(PROMPT, GREEDY).choices[0]

    said = [Piece(0, "**He**"), Piece(0, "llo\x1b[2J")]
    monkeypatch.setattr(conversation.llm, "stream", lambda *_, **__: Said(said))
    shown = []
    for command in ("/markdown", "/colour", "/colour", "/markdown"):
        conversation.handle(command)
        before = len(printed(conversation))
        conversation.handle("Hello!")
        shown.append(printed(conversation)[before:])
    assert ["**He" in one for one in shown] == [False, True, False, True]
    assert ["\x1b[1mHe" in one for one in shown] == [True, False, True, False]
    assert all("\x1b[2J" not in one for one in shown)
    assert all("\u241b[2J" in one for one in shown)
    assert conversation.turns[0] == conversation.turns[1] == ("Hello!", "**He**llo\x1b[2J")


@pytest.mark.parametrize(("options", "told"), [([], "the model writes them"), (["--plain"], "Markdown")])
def test_chat_has_markdown_in_terminals_only(options: list[str], told: str) -> None:
    piped = run("chat", "-n", "2", stdin="/markdown")
    assert "answers are shown as Markdown" in piped.stdout
    in_terminal = run("chat", *options, stdin="/markdown", FORCE_COLOR="1", TERM="xterm").stdout
    assert f"answers are shown as {told}" in in_terminal


def test_chat_divides_thoughts_from_the_answer(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: list[SamplingParams] = []

    class Said(list[Piece]):
        choice = conversation.llm.generate(PROMPT, GREEDY).choices[0]

    def stream(_ids: list[int], given: SamplingParams, drafter: object, adapter: object) -> Said:
        params.append(given)
        texts = ("<th", "ink>\nHe says ", "hello.</th", "ink>\n\nHello, ", "you!")
        return Said(Piece(0, text) for text in texts)

    monkeypatch.setattr(ReasoningFormat, "of", lambda _: ReasoningFormat("<think>", "</think>", hidden=True))
    monkeypatch.setattr(conversation.llm, "stream", stream)
    conversation.handle("Hello!")
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed(conversation))
    assert plain.startswith("He says hello.\n\nHello, you!\n")
    assert "\x1b[2;3mHe says" in printed(conversation)
    assert conversation.turns == [("Hello!", "Hello, you!")]  # templates drop the thoughts of earlier turns
    assert not params[0].skip_special_tokens  # or the tags would have no text


def test_python_runs_it_as_a_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "soothsay", "--help"], capture_output=True, text=True, check=True
    )
    assert "speculative decoding" in shown.stdout.lower()


def test_ctrl_c_stops_one_answer_and_keeps_it(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored
    whole = conversation.llm.chat([{"role": "user", "content": LOOPING}], GREEDY).text
    presses = iter([signal.SIGINT])

    def press_once(*_: object, **__: object) -> None:
        for press in presses:
            signal.raise_signal(press)

    with monkeypatch.context() as patch:
        patch.setattr(conversation.console, "out", press_once)
        conversation.handle(LOOPING)
    assert "; stopped" in printed(conversation)
    (question, answer), *rest = conversation.turns
    assert (question, rest) == (LOOPING, [])
    assert 0 < len(answer) < len(whole)
    assert whole.startswith(answer)
    assert not conversation.llm.engine.has_work
    conversation.handle("Hello!")
    assert len(conversation.turns) == 2
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_is_not_held_back(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_twice(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation.console, "out", press_twice)
    with pytest.raises(KeyboardInterrupt):
        conversation.handle(LOOPING)


def test_chat_drops_the_oldest_turns_of_a_long_conversation() -> None:
    lines = [f"What do you think of the number {number}, my friend?" for number in range(4)]
    result = run("chat", "-t", "0", "-n", "16", "--max-context", "80", stdin="\n".join(lines))
    assert result.exit_code == 0
    assert "outgrown the context of 80 tokens: dropped the oldest turn" in result.stdout
    assert result.stdout.count("tokens/s") == 4


def test_chat_keeps_the_conversation_when_a_message_is_too_long(conversation: Conversation) -> None:
    conversation.handle("Hello!")
    with pytest.raises(RequestError, match="the context of 2048 must hold the answer too"):
        conversation.handle("word " * 3000)
    assert [question for question, _ in conversation.turns] == ["Hello!"]


def test_chat_needs_a_template(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(Path(soothsay.__file__).parent / "bundled" / "sibyl", bare)
    (bare / "chat_template.jinja").unlink()
    error = f"Error: {bare} has no chat template; try: soothsay generate --model {bare} PROMPT\n"
    for args in ([bare], ["--model", bare], [bare, "--model", bare]):
        result = run("chat", *map(str, args), stdin="Hello!")
        assert (result.exit_code, result.stderr) == (2, error), args


# demo


def test_demo_shows_equal_tokens() -> None:
    result = run("demo", "-m", "sibyl", "--repeats", "2", "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if re.search(r"suffix +\d+ +[\d.]+x", line)]
    assert len(rows) == len(TASKS)
    assert all(row.rstrip().endswith("✓") for row in rows)
    assert "Every answer is the same as plain decoding's, token for token" in result.stdout
    assert re.search(
        r"suffix over all prompts: [\d.]+x as fast as plain, [\d.]+ tokens a step", result.stdout
    )
    assert "temperature 1" in result.stdout
    assert all(f"\n{task.id} (" in result.stdout for task in TASKS)


def test_demo_compares_what_is_asked_for() -> None:
    drafters = ("prompt-lookup(min_ngram=1)", "draft-model(model=sibyl)")
    options = [option for drafter in drafters for option in ("-d", drafter)]
    result = run("demo", "-m", "sibyl", "--repeats", "1", "-n", "4", *options)
    assert result.exit_code == 0, result.output
    assert all(f"{drafter} over all prompts" in result.stdout for drafter in drafters)
    assert result.stdout.count("✓") == 2 * len(TASKS) + 1


def test_demo_fails_loudly_where_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = demo_module.decode

    def lie(llm: LLM, task: PromptEntry, drafter: Callable[..., object], max_tokens: int) -> DemoAnswer:
        done = decode(llm, task, drafter, max_tokens)  # type: ignore[arg-type]
        if task.id == "maths" and max(done.stats.drafted_at, default=0):
            done.pieces[-1] = done.pieces[-1]._replace(token=done.pieces[-1].token + 1)
        return done

    monkeypatch.setattr(demo_module, "decode", lie)
    result = run("demo", "-m", "sibyl", "--repeats", "1", "-d", "prompt-lookup(min_ngram=1)", "-n", "24")
    assert result.exit_code == 1
    assert result.stdout.count("DIFFERS") == 1
    alarm = "DIFFERENT TOKENS  maths with prompt-lookup(min_ngram=1) does not say what plain decoding says."
    assert alarm in result.stdout
    assert "Every answer" not in result.stdout


def test_demo_goes_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    result = run("demo", "--repeats", "1", "-d", "suffix", "-n", "4")
    assert result.exit_code == 0, result.output
    assert "smollm2 could not be downloaded from http://127.0.0.1:9/simple" in result.stderr
    assert "sibyl answers" in result.stdout


# inspect


def facts(*args: str) -> dict[str, str]:
    result = run("inspect", *args)
    assert result.exit_code == 0, result.output
    lines = [re.split(r"  +", line.rstrip(), maxsplit=1) for line in result.stdout.splitlines()]
    return {line[0] or f"{lines[i - 1][0]}, more": line[-1] for i, line in enumerate(lines)}


def test_inspect_tells_the_facts_without_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("soothsay.model.weights.load.load_model")
    told = facts("sibyl", "--context", "1000", "--requests", "3", "--dtype", "float32")
    assert told["family"] == "llama"
    assert told["layers"] == "8 of 384 hidden, 1,024 feed-forward"
    assert told["attention"] == "6 heads of 64, 2 for keys and values"
    assert told["vocabulary"] == "8,192 tokens, the head shares the embedding"
    assert told["context"] == "2,048 tokens"
    assert told["parameters"] == "15.7M, stored as bfloat16"
    assert told["on disk"].startswith("31.5 MB, ")
    assert told["tokenizer"] == "8,192 tokens, with a chat template"
    assert told["end tokens"] == "0 <|end|>"
    assert told["runs here"].startswith("bfloat16 weights, float32 between; ")
    assert told["weights"] == "31.5 MB in memory, 6.3 MB of embeddings mapped"
    assert told["KV cache"] == "8.2 kB a token, 8.2 MB for a context of 1,000"
    assert told["KV cache, more"] == "24.6 MB for 3 of these requests"


def test_inspect_says_which_drafters_fit() -> None:
    listed = run("inspect", "sibyl", COLUMNS="400").stdout.split("✓ ")[1].splitlines()[0]
    fitting = listed.strip().split(", ")
    assert {"prompt-lookup", "eagle", "eagle2", "eagle3", "hydra", "medusa", "block"} <= {*fitting}
    assert facts("sibyl", "-d", "draft-model(model=sibyl)")["drafters"] == (
        "✓ draft-model(model=sibyl), trees of up to 16 nodes"
    )


def test_inspect_reads_gguf_as_it_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    matrices = {"attn_q": 32, "attn_k": 32, "attn_v": 32, "attn_output": 32, "ffn_gate": 64, "ffn_up": 64}
    shapes = {f"blk.0.{name}": (rows, 32) for name, rows in matrices.items()}
    shapes |= {"blk.0.ffn_down": (32, 64), "token_embd": (48, 32)}
    for name, shape in shapes.items():
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", quantize(np.zeros(shape, np.float32), kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    told = facts(str(path))
    assert told["parameters"] == "11.9K, stored as 99.2% Q8_0, 0.8% F32"
    assert told["tokenizer"] == "none: prompts have to be token ids"


# all of them


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--model", "nope"], "no model at 'nope'"),
        (["generate", "x", "--drafter", "bogus"], "drafter 'bogus' is unknown"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is not possible"),
        (
            ["generate", "x", "-m", "sibyl", "--max-context", "2", "--chat"],
            "the context of 2 must hold the answer too",
        ),
        (["generate", ""], "the prompt is empty"),
        (["chat", "--model", "nope"], "no model at 'nope'"),
        (["chat", "--model", "smolm2"], "Did you mean smollm2?"),
        (["chat", "smolm2"], "Did you mean smollm2?"),
        (["generate", "x", "--drafter", "sufix"], "Did you mean suffix?"),
        (["demo", "-m", "sibyl", "--drafter", "draft-model(model=nowhere)"], "no model at 'nowhere'"),
        (["inspect", "nope"], "no model at 'nope'"),
        (["inspect", "sibyl", "--drafter", "draft-model(model=nope)"], "no model at 'nope'"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--temprature", "1"], "--temperature"),
        (["generate", "x", "--dtype", "float64"], "'bfloat16'"),
        (["generate", "x", "--file", __file__], "not both"),
        (["generate", "--file", "/no/such/file"], "does not exist"),
        (["demo", "--drafter", "none"], "what the others are compared with"),
        (["chat", "sibyl", "--model", "smollm2"], "MODEL is 'sibyl', but --model is 'smollm2'"),
        (["genrate"], "Did you mean 'generate'"),
        (["generate", "x", "-n", "many"], " integer"),
        (["generate", "x", "-t", "hot"], "'-t'"),
        (["generate", "x", "--threads", "0"], "'--threads'"),
    ],
)
def test_bad_usage_gives_a_hint(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not re.search("Input should|Value error|unable to parse", result.stderr)


def test_a_prompt_has_to_be_text() -> None:
    assert "not UTF-8 text" in run("generate", stdin=b"\xff\xfe").stderr


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("experts", "int8, bfloat16"),
        ("peers", "bfloat16; auto for a .gguf file"),
        ("quality", "auto"),
    ],
)
def test_help_shows_the_default_dtypes_of_a_benchmark(command: str, default: str) -> None:
    assert f"[default: ({default})]" in " ".join(run("bench", command, "--help").output.split())


def test_help_and_version() -> None:
    result = run("--help")
    assert all(command in result.stdout for command in ("generate", "chat", "demo", "inspect"))
    assert run("--version").stdout == f"soothsay {soothsay.__version__}\n"
    process = subprocess.run(main("generate", "-h"), capture_output=True, text=True, check=True)
    assert "--drafter" in process.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_full_disk_is_an_error_in_one_line() -> None:
    ask = "generate", "--chat", "Say hi.", "-m", "sibyl", "-n", "4"
    with open("/dev/full", "w") as full:
        whole = subprocess.run(main(*ask), stdout=full, stderr=subprocess.PIPE, text=True)
        helped = subprocess.run(main("--help"), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (whole.returncode, whole.stderr.count("\n")) == (2, 1), whole.stderr
    assert whole.stderr == "Error: the output cannot be read or written (No space left on device)\n"
    assert (helped.returncode, helped.stderr) == (2, whole.stderr)
    measure = "bench", "step", "sibyl", "--rows", "1", "--rounds", "1", "--json", "/dev/full"
    result = subprocess.run(main(*measure), capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.endswith("Error: /dev/full cannot be read or written (No space left on device)\n")


@pytest.mark.skipif(os.name != "posix", reason="closes streams in a shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    command = shlex.join(main("generate", "Say hi.", "-m", "sibyl", "-n", "4"))
    process = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = subprocess.run(
        main("generate", "--chat", "Say hi.", "-m", "sibyl", "-n", "4"),
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = process.stderr.splitlines()
    assert re.fullmatch(r"Warning: the times of passes .*file.*Not a directory.*", line), line


def test_the_command_line_itself_needs_no_torch() -> None:
    bare = "import sys, types; p = types.ModuleType('soothsay'); p.__path__ = [sys.argv[1]]"
    check = "sys.modules['soothsay'] = p; import soothsay.cli.app; sys.exit('torch' in sys.modules)"
    package = str(Path(soothsay.__file__).parent)
    subprocess.run([sys.executable, "-c", f"{bare}; {check}", package], check=True)


@pytest.mark.parametrize("command", [("verify",), ("train", "data", "sibyl", str(DEMO), "-o", os.devnull)])
def test_answers_that_are_compared_or_kept_have_a_token(command: tuple[str, ...]) -> None:
    result = run(*command, "-n", "0")
    assert result.exit_code == 2
    assert "Invalid value for '--max-tokens'" in result.output
