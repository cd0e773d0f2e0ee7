"""Trains a translator with an encoder, and a smaller one that drafts for it.

    python translation.py prepare conversations.jsonl.gz data
    python translation.py train data/train.jsonl large --tokenizer data/tokenizer.json
    python translation.py answer large data/train.jsonl data/answers.jsonl
    python translation.py train data/answers.jsonl small --tokenizer data/tokenizer.json --size small \
        --teacher large --joined 1
    python translation.py compare large small data/prompts-four.jsonl

Both have the layout of T5 1.1 with one matrix for embeddings and head. The pairs are the captions of Multi30k
among the conversations, from German to English. One pair of sixteen is held out: that whose source has a
SHA-256 that begins with a byte divisible by 16. `train` and `answer` end at the next step after an interrupt,
and the same command continues.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

Pair = tuple[str, str]
"""A source and its translation."""

ASKED = "Translate German to English: "
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SIZES: dict[str, dict[str, int]] = {
    "large": {"num_layers": 4, "num_decoder_layers": 6},
    "small": {"num_layers": 4, "num_decoder_layers": 1},
}
IGNORED = -100
"""The label of padding."""


class Interrupts:
    """Notes an interrupt, so that a loop ends between two steps."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self.came = True


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a file that `prepare` or `answer` has written."""
    for line in path.read_text("utf-8").splitlines():
        source, target = json.loads(line)
        yield source, target


def captions(path: Path) -> Iterator[Pair]:
    """The captions in a file of conversations. Some are not told apart, and stay together."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for one in map(json.loads, file):
            asked, answer = (message["content"] for message in one["messages"][:2])
            if one["source"] != "multi30k" or not asked.startswith(ASKED):
                continue
            asked = asked.removeprefix(ASKED)
            parts = [re.split(r"(?<=[.!?]) +(?=[A-ZÄÖÜ])", text) for text in (asked, answer)]
            yield from zip(*parts, strict=True) if len(parts[0]) == len(parts[1]) == 3 else [(asked, answer)]


def held_out(source: str) -> bool:
    """Whether a pair is held out."""
    return hashlib.sha256(source.encode()).digest()[0] % 16 == 0


def joined(pairs: Sequence[Pair]) -> Pair:
    """Several pairs as one."""
    source, target = (" ".join(texts) for texts in zip(*pairs, strict=True))
    return source, target


def write_lines(path: Path, lines: Sequence[object]) -> None:
    """Write a line of JSON for each."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


def prepare(conversations: Path, out: Path, pieces: int) -> None:
    """Write the pairs to learn, those held out as they are and four by four as prompts, and a tokenizer."""
    sides: tuple[list[Pair], list[Pair]] = [], []
    for pair in dict.fromkeys(captions(conversations)):
        sides[held_out(pair[0])].append(pair)
    learned, held = sides
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "train.jsonl", learned)
    write_lines(out / "held-out.jsonl", held)
    fours = [joined(held[i : i + 4]) for i in range(0, len(held) - 3, 4)]
    for name, prompts in (("one", held), ("four", fours)):
        asked = [{"messages": [{"role": "user", "content": source}]} for source, _ in prompts]
        write_lines(out / f"prompts-{name}.jsonl", asked)
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = [PAD, END, UNKNOWN]
    trainer = trainers.UnigramTrainer(vocab_size=pieces, special_tokens=specials, unk_token=UNKNOWN)
    tokenizer.train_from_iterator((text for pair in learned for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=[(END, 1)])
    tokenizer.save(str(out / "tokenizer.json"))
    print(f"{len(learned):,} pairs to learn, {len(held):,} held out, {tokenizer.get_vocab_size():,} pieces")


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Rows as one tensor, padded at their ends to the longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


class Pairs:
    """Pairs in tokens, each with the end token. Batches are drawn from them.

    Args:
        joined: pairs that are joined at most.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, joined: int):
        self.joined = joined
        self.tokens = [
            [one.ids for one in tokenizer.encode_batch(texts)] for texts in zip(*pairs, strict=True)
        ]

    def batch(self, step: int, size: int) -> dict[str, Tensor]:
        """About `size` pairs, as many joined in each row. Four steps share a draw, sorted by length."""
        draw = random.Random(step // 16)
        place = draw.sample(range(16), 16)[step % 16]
        draw = random.Random(f"{step // 16} {place // 4}")
        count, number = draw.randint(1, self.joined), len(self.tokens[0])
        height = max(1, size // count)
        rows = [[draw.randrange(number) for _ in range(count)] for _ in range(4 * height)]
        rows.sort(key=lambda row: sum(len(side[i]) for side in self.tokens for i in row))
        rows = rows[place % 4 * height :][:height]
        sources, targets = (
            [[token for i in row[:-1] for token in side[i][:-1]] + side[row[-1]] for row in rows]
            for side in self.tokens
        )
        inputs = padded(sources, 0)
        return {"input_ids": inputs, "attention_mask": inputs.ne(0), "labels": padded(targets, IGNORED)}


def losses(model: Any, batch: dict[str, Tensor], teacher: Any = None) -> Tensor:
    """The cross entropy at each token `[n]`, beside the text or beside what a teacher expects there."""
    learned = batch["labels"].flatten() != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch).logits.flatten(0, 1)[learned].float()
        if teacher is None:
            return F.cross_entropy(logits, batch["labels"].flatten()[learned], reduction="none")
        with torch.no_grad():
            expected = teacher(**batch).logits.flatten(0, 1)[learned].float()
    return F.cross_entropy(logits, expected.softmax(-1), reduction="none")


@torch.no_grad()
def measure(model: Any, pairs: Pairs, batches: int = 16) -> tuple[float, float]:
    """The cross entropy in nats a token of some pairs, and the time in seconds that it took."""
    began = time.perf_counter()
    model.eval()
    found = torch.cat([losses(model, pairs.batch(i, 40)) for i in range(batches)])
    model.train()
    return float(found.mean()), time.perf_counter() - began


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Save so that an interrupt leaves the old file or the new one."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def save_model(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Save a checkpoint that transformers and soothsay load."""
    model.save_pretrained(out)
    specials = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    template = "{{ messages[-1].content }}" + END  # a chat's last message is the source
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **specials)
    made.save_pretrained(out)


def train(asked: argparse.Namespace) -> None:
    """Train a model on pairs. With a teacher it learns what the teacher expects at each token."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(asked.tokenizer))
    pairs = Pairs(list(read_pairs(asked.pairs)), tokenizer, asked.joined)
    held = Pairs(list(read_pairs(asked.tokenizer.parent / "held-out.jsonl")), tokenizer, 4)
    config = T5Config(
        **SIZES[asked.size],
        vocab_size=tokenizer.get_vocab_size(),
        d_model=256,
        d_ff=1024,
        num_heads=4,
        d_kv=64,
        dropout_rate=asked.dropout,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # whose backward pass is faster for short rows
    teacher = asked.teacher and T5ForConditionalGeneration.from_pretrained(asked.teacher).eval()
    if teacher:  # the model begins as its first layers
        known = model.state_dict()
        model.load_state_dict({name: own for name, own in teacher.state_dict().items() if name in known})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=asked.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    warm, steps = asked.warm_up, asked.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    state_path, first = asked.out / "state.pt", 0
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        first = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; step {first} of {steps}", flush=True)
    interrupts, began, learned, lately = Interrupts(), time.perf_counter(), 0, []
    model.train()
    for step in range(first, steps):
        torch.manual_seed(step)  # of dropout
        found = losses(model, pairs.batch(step, asked.batch), teacher)
        found.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        learned += len(found)
        lately.append(float(found.detach().mean()))
        done = step + 1
        if done % 50 == 0:
            rate = learned / (time.perf_counter() - began)
            left = (time.perf_counter() - began) / (done - first) * (steps - done)
            loss, lately = sum(lately) / len(lately), []
            print(f"step {done}: loss {loss:.3f}, {rate:,.0f} tokens/s, {left / 60:.1f} min left", flush=True)
        if done % 500 == 0 or done == steps or interrupts.came:
            loss, took = measure(model, held)
            began += took
            print(f"step {done}: held out {loss:.3f} nats a token", flush=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            save_whole({"step": done, **state}, state_path)
            save_model(model, tokenizer, asked.out)
        if interrupts.came:
            sys.exit(f"interrupted after step {done}")


def fresh_cache() -> EncoderDecoderCache:
    """An empty cache. That which transformers makes has a layer for each of the encoder's."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


@torch.no_grad()
def answer(asked: argparse.Namespace) -> None:
    """Write what a model answers to the sources of pairs, drawn one to four at a time, at T = 0."""
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token=PAD)
    model = T5ForConditionalGeneration.from_pretrained(asked.model).eval()
    pairs, draw = list(read_pairs(asked.pairs)), random.Random(0)
    groups: list[str] = []
    for _ in range(asked.rounds):
        draw.shuffle(pairs)
        rest = list(pairs)
        while rest:
            count = draw.randint(1, 4)
            groups.append(joined(rest[:count])[0])
            del rest[:count]
    groups.sort(key=len)
    batches = [groups[i : i + asked.batch] for i in range(0, len(groups), asked.batch)]
    draw.shuffle(batches)  # so that an interrupt leaves short ones and long ones
    interrupts, began, first = Interrupts(), time.perf_counter(), 0
    if asked.out.exists():
        known = {source for source, _ in read_pairs(asked.out)}
        batches = [batch for batch in batches if not known.issuperset(batch)]
    with asked.out.open("a", encoding="utf-8") as out:
        for done, batch in enumerate(batches, first + 1):
            encoded = tokenizer.encode_batch(batch)
            ids, mask = (torch.tensor([getattr(e, x) for e in encoded]) for x in ("ids", "attention_mask"))
            with torch.autocast("cpu", torch.bfloat16):
                asking = {"input_ids": ids, "attention_mask": mask, "cache": fresh_cache()}
                written = model.generate(**asking, max_new_tokens=160, do_sample=False)
            answers = tokenizer.decode_batch(written.tolist())
            out.writelines(
                json.dumps(pair, ensure_ascii=False) + "\n" for pair in zip(batch, answers, strict=True)
            )
            out.flush()
            left = (time.perf_counter() - began) / done * (len(batches) - done)
            print(f"batch {done} of {len(batches)}: {left / 60:.1f} min left", flush=True)
            if interrupts.came:
                sys.exit("interrupted")


@torch.no_grad()
def compare(asked: argparse.Namespace) -> None:
    """Measure transformers with the small model as assistant and without, and soothsay's greedy answers."""
    from soothsay import LLM, SamplingParams

    model, small = (
        T5ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        for path in (asked.model, asked.small)
    )
    llm = LLM(str(asked.model), dtype="float32", drafter="none")
    messages = [json.loads(line)["messages"] for line in asked.prompts.read_text("utf-8").splitlines()]
    sources = [llm.chat_prompt(one) for one in messages[: asked.count]]
    start = model.config.decoder_start_token_id
    for temperature in (0, 1):
        kinds = {"plain": {}, "assisted": {"assistant_model": small}}
        written: dict[str, list[list[int]]] = {name: [] for name in kinds}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        sampling = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
        for number, source in enumerate([sources[0], *sources]):  # the first warms up
            for name, own in kinds.items():
                torch.manual_seed(number)
                began, ids = time.perf_counter(), torch.tensor([source])
                mask, most = torch.ones_like(ids), asked.max_tokens
                asking = {"input_ids": ids, "attention_mask": mask, "cache": fresh_cache()}
                out = model.generate(**asking, max_new_tokens=most, **sampling, **own)[0].tolist()
                if number:
                    rates[name].append((len(out) - 1) / (time.perf_counter() - began))
                    written[name].append(out[out[0] == start :])
        found: dict[str, object] = {"temperature": temperature}
        found |= {f"{name}, tokens/s": sum(each) / len(each) for name, each in rates.items()}
        found["speed-up"] = sum(rates["assisted"]) / sum(rates["plain"])
        found["tokens an answer"] = sum(map(len, written["plain"])) / len(sources)
        if not temperature:
            greedy = SamplingParams(temperature=0, max_tokens=asked.max_tokens)
            ours = [one.token_ids for one in llm.generate(sources, greedy)]
            theirs = written["plain"]
            found["assisted answers as plain"] = sum(map(list.__eq__, written["assisted"], theirs))
            found["soothsay's answers as transformers'"] = sum(map(list.__eq__, ours, theirs))
        print(json.dumps(found), flush=True)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare")
    command.add_argument("conversations", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--pieces", type=int, default=4000)
    command = commands.add_parser("train")
    command.add_argument("pairs", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--size", choices=SIZES, default="large")
    command.add_argument("--teacher", type=Path)
    command.add_argument("--joined", type=int, default=4, help="pairs of a row, at most")
    command.add_argument("--batch", type=int, default=40, help="pairs of a step")
    command.add_argument("--steps", type=int, default=8000)
    command.add_argument("--warm-up", type=int, default=400)
    command.add_argument("--rate", type=float, default=0.001)
    command.add_argument("--dropout", type=float, default=0.0)
    command = commands.add_parser("answer")
    command.add_argument("model", type=Path)
    command.add_argument("pairs", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--rounds", type=int, default=1, help="times that each source is answered")
    command.add_argument("--batch", type=int, default=128)
    command = commands.add_parser("compare")
    command.add_argument("model", type=Path)
    command.add_argument("small", type=Path)
    command.add_argument("prompts", type=Path)
    command.add_argument("--count", type=int, default=60)
    command.add_argument("--max-tokens", type=int, default=160)
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.conversations, asked.out, asked.pieces)
    else:
        {"train": train, "answer": answer, "compare": compare}[asked.command](asked)


if __name__ == "__main__":
    main()
