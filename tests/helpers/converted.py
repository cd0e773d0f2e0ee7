"""Compare random models with what llama.cpp's own converter makes of them. No test runs it.

`PYTHONPATH=SOURCE:SOURCE/gguf-py python tests/helpers/converted.py [NAME ...] [--server PATH]`: SOURCE is a
folder with llama.cpp's source, names are those of `families.CASES`, the server is a built `llama-server`.

A line has the largest differences of log-probabilities after three prompts: of our reader's model from
transformers', of the same from llama.cpp's, and of these two. Where the first is large and the second small,
the file lacks a setting of the test's model. llama.cpp's GELU is a table, and differs by some 1e-3.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from families import CASES, VOCAB, array, random_oracle, random_tokens, run

from soothsay.core.batch import Rows
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

KINDS = {"full_attention": "attention", "linear_attention": "mamba"}
SIGMOID = {"scoring_func": "sigmoid"}

AS_PUBLISHED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bamba": ({}, {"attn_rotary_emb": 8}),
    "cohere2": ({}, {"rotary_pct": 1.0}),
    "deepseek_v2": ({"attention_bias": False}, {}),
    "deepseek_v2_lite": ({"n_group": 1, "topk_group": 1}, {}),
    "deepseek_v32": ({}, SIGMOID),
    "ernie": ({"use_bias": False}, {}),
    "falcon_groups": ({"ffn_hidden_size": 256, "bias": False}, {}),
    "falcon_h1": ({}, {"head_dim": 32}),
    "gemma2": ({"query_pre_attn_scalar": 24}, {}),
    "gemma3n": ({"altup_num_inputs": 4, "vocab_size_per_layer_input": VOCAB}, {}),
    "glm": ({"head_dim": 16, "rms_norm_eps": 1e-5}, {"seq_length": 256}),
    "glm4_moe_lite": ({"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1}, {}),
    "glm_moe_dsa": ({"first_k_dense_replace": 1}, SIGMOID),
    "gpt2": ({"n_inner": 256}, {"n_ctx": 256}),
    "granite4_experts": ({}, {"layer_types": KINDS}),
    "hunyuan": ({"max_position_embeddings": 32768}, {}),
    "minicpm3": (
        {
            **{"v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
            "rope_parameters": {
                **CASES["minicpm3"][1]["rope_parameters"],
                "original_max_position_embeddings": 256,
            },
        },
        {},
    ),
    "minimax_m2": ({}, {"rotary_dim": 16}),
    "phi": ({"intermediate_size": 256}, {}),
    "qwen2_moe": ({"mlp_only_layers": []}, {}),
    "qwen3_next": ({"mlp_only_layers": []}, {}),
}
"""Settings of the random model, and keys that published files have, so that the converter expects them.

A mapping renames the elements of a list."""

Scores = list[np.ndarray[Any, Any]] | str
"""Log-probabilities after each prompt, or why there are none."""


def convert(directory: Path, added: Mapping[str, Any]) -> Path:
    """Convert a model in a directory as llama.cpp does, with a vocabulary that is made up."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    file = directory / "config.json"
    config = json.loads(file.read_text())
    for key, value in added.items():
        config[key] = [value.get(one, one) for one in config[key]] if isinstance(value, dict) else value
    file.write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    (directory / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []})
    )
    kind = get_model_class(
        get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT), mmproj=False
    )
    kind.no_mtp = True
    out = directory / "model.gguf"
    writing = kind(directory, gguf.LlamaFileType.ALL_F32, out)

    def set_vocab() -> None:
        writing.gguf_writer.add_tokenizer_model("gpt2")
        writing.gguf_writer.add_tokenizer_pre("qwen2")
        writing.gguf_writer.add_token_list([*vocabulary])
        writing.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
        writing.gguf_writer.add_token_merges(["a b"])

    writing.set_vocab = set_vocab
    writing.write()
    return out


def by_llama_cpp(server: str, file: Path, prompts: Sequence[Sequence[int]]) -> Scores:
    """What llama.cpp's server says."""
    if not server:
        return "no server"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = [
        "-t",
        "1",
        "-c",
        "256",
        "-fa",
        "off",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "--no-warmup",
        "--no-webui",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([server, "-m", str(file), "--port", str(port), *options], **quiet)
    try:
        for _ in range(100):
            if process.poll() is not None:
                return "llama.cpp refuses"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        scores = []
        for prompt in prompts:
            asked = {"prompt": prompt, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "top_k": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion",
                json.dumps(asked | {"samplers": ["top_k"]}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                said = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
            row = np.full(VOCAB, np.nan)
            row[[one["id"] for one in said]] = [one["logprob"] for one in said]
            scores.append(row)
        return scores
    except OSError as error:
        return f"llama.cpp: {error}"
    finally:
        process.kill()
        process.wait()


def attempted(work: Callable[[], Scores]) -> Scores:
    """What some work gives, or its error in one line."""
    try:
        return work()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:160].replace("\n", " ")


def compare(name: str, server: str) -> str:
    """The line of a model."""
    settings, added = AS_PUBLISHED.get(name, ({}, {}))
    prompts = random_tokens(np.random.default_rng(0), 40, 9, 100)
    oracle = random_oracle(name, **settings)
    with TemporaryDirectory() as folder, torch.no_grad():
        oracle.save_pretrained(folder)
        try:
            file = convert(Path(folder), added)
        except (Exception, SystemExit) as error:
            return f"{name:24} the converter refuses: {type(error).__name__}: {error}"[:160].replace(
                "\n", " "
            )
        theirs = [oracle(torch.tensor([p])).logits[0, -1].log_softmax(-1).numpy() for p in prompts]

        def ours() -> Scores:
            model = load_model(open_checkpoint(file), "float32")
            logits = run(model, [Rows(array(prompt), 0) for prompt in prompts])[0]
            return [rows[-1].log_softmax(-1).numpy()[: len(theirs[0])] for rows in logits]

        own, third = attempted(ours), by_llama_cpp(server, file, prompts)
    pairs = {"ours, transformers": (own, theirs), "ours, llama.cpp": (own, third)}
    pairs["transformers, llama.cpp"] = theirs, third
    return f"{name:24} " + "; ".join(f"{key}: {_difference(*pair)}" for key, pair in pairs.items())


def _difference(some: Scores, others: Scores) -> str:
    for one in (some, others):
        if isinstance(one, str):
            return one
    return f"{max(float(np.nanmax(np.abs(a - b))) for a, b in zip(some, others, strict=True)):.1e}"


def main() -> None:
    """Compare the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*CASES])
    parser.add_argument("--server", default="")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in asked.names:
        print(compare(name, asked.server), flush=True)


if __name__ == "__main__":
    main()
