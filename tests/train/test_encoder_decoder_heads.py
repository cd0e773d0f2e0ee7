"""Heads that read the last feature learn from the answers of an encoder-decoder, and draft for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from encoder_decoders import START, VOCAB, random_sequence_oracle
from families import load, random_tokens
from safetensors.torch import save_file

from soothsay import LLM, SamplingParams
from soothsay.drafters.heads.checkpoints.head_directory import read_head, write_head
from soothsay.drafters.heads.medusa import MedusaHead
from soothsay.errors import DrafterError, TrainingError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train import heads, losses, new_heads
from soothsay.train.examples import Example
from soothsay.train.features import FeatureFolder, FeatureRecorder, recorded_examples
from soothsay.train.sequences import TrainingKernels

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def whole_teacher() -> Iterator[None]:
    """Keep all tokens of the teacher, whose distributions are flat here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "TOP", VOCAB)
        yield


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits are products that are divided by the root of the hidden size."""
    directory = tmp_path_factory.mktemp("t5")
    random_sequence_oracle("t5").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def examples(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """Answers with the features of their tokens."""
    folder = FeatureFolder(tmp_path_factory.mktemp("kept") / "features", (3,))
    llm = LLM(load(t5), drafter="none", kv_tokens=512, prefix_caching=False)
    recorder = FeatureRecorder(llm.engine.target, folder.taps)
    for number, source in enumerate(random_tokens(np.random.default_rng(0), 5, 12, 30)):
        (request,) = llm.requests(source, replace(SAMPLED, seed=number), drafter=recorder)
        llm.engine.add(request)
        while request.finish_reason is None:
            llm.engine.step()
        folder.write(str(number), request.tokens.tolist(), request.num_prompt, *recorder.take(request))
    return list(recorded_examples(folder.path, 1000))


def recipe(t5: Path, method: str) -> heads.HeadRecipe:
    target = load_model(open_checkpoint(t5), "float32", "cpu", TrainingKernels())
    kind = {"medusa": heads.MedusaRecipe, "hydra": heads.HydraRecipe}[method]
    made = getattr(new_heads, method)(target)
    return kind(target, made, lambda _: {}, lambda head, path: write_head(head, path, "t5"), anchors=1.0)


def test_medusa_learns_the_distributions_of_transformers(t5: Path, examples: list[Example]) -> None:
    oracle, own = random_sequence_oracle("t5"), recipe(t5, "medusa")
    assert isinstance(own.head, MedusaHead)
    with torch.no_grad():
        for parameter in own.head.parameters():
            parameter.normal_(std=0.3)
        found = own.losses(examples, torch.Generator().manual_seed(0))
        expected = [[] for _ in own.head.blocks]
        for example in examples:
            begun = int(example.answer.argmax()) - 1
            assert example.tokens[begun] == START
            source, target = torch.from_numpy(example.tokens)[None].tensor_split([begun], dim=1)
            out = oracle(input_ids=source, decoder_input_ids=target, output_hidden_states=True)
            states, log_p = out.decoder_hidden_states[-1][0], out.logits[0, :-1].log_softmax(-1)
            for k, block in enumerate(own.head.blocks):
                known, p = F.pad(states, (0, 0, 1, 0))[: len(log_p) - k], log_p[k:]  # zeros before the start
                log_q = (block(known) @ oracle.shared.weight.t() * states.shape[1] ** -0.5).log_softmax(-1)
                expected[k].append((p.exp() * (p - log_q)).sum(-1))
    for k, values in enumerate(expected, 1):
        assert abs(float(found[f"loss_{k}"]) - float(torch.cat(values).mean())) < 1e-3


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_a_trained_head_drafts_and_changes_no_token(
    method: str, t5: Path, examples: list[Example], tmp_path: Path
) -> None:
    own = recipe(t5, method)
    optimizer = torch.optim.AdamW(own.head.parameters(), lr=0.01)
    losses = []
    for step in range(40):
        loss = own.losses(examples, torch.Generator().manual_seed(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    own.save(tmp_path)
    llm = LLM(load(t5), drafter="none", kv_tokens=512)
    sources = [example.tokens[: example.answer.argmax() - 1].tolist() for example in examples]
    modes = [replace(SAMPLED, seed=number) for number in range(len(sources))]
    plain = llm.generate(sources, modes)
    assert [one.token_ids for one in plain] == [one.tokens[one.answer].tolist() for one in examples]
    drafted = llm.generate(sources, modes, drafter=f"{method}(model={tmp_path})")
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted for one in drafted) > 20


def test_what_cannot_be_is_refused(t5: Path, examples: list[Example], tmp_path: Path) -> None:
    texts = [replace(example, features=None) for example in examples]
    with pytest.raises(TrainingError, match="train data"):
        recipe(t5, "medusa").losses(texts, torch.Generator())
    (tmp_path / "config.json").write_text('{"soothsay_method": "redrafter"}')
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match="cannot draft for an encoder-decoder"):
        read_head(tmp_path, LLM(load(t5), drafter="none", kv_tokens=64).engine.target)
