"""`soothsay bench quality`: what integers cost in quality, beside float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from soothsay.bench.bench_plans import QualityPlan
from soothsay.bench.measure import Meter, Progress
from soothsay.config import DType
from soothsay.core.batch import Rows
from soothsay.corpus import encode_text
from soothsay.errors import ModelError, RequestError
from soothsay.model.timing.pass_predicting import held_bytes, linear_layers
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import Checkpoint, open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model

REFERENCE: DType = "float32"
"""The type that all others are compared with."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How close a model's distributions are to those of float32."""

    dtype: str
    bits: float
    """Bits a weight of the linear layers, with scales."""
    tokens: int
    """Tokens whose distribution was compared."""
    perplexity: float
    divergence: float
    """Kullback-Leibler divergence from float32, mean over tokens, in nats."""
    equal_best: float
    """Share of the tokens at which the likeliest token is that of float32."""


def bench_quality(
    plan: QualityPlan, text: str, dtypes: Sequence[DType] = ("auto",), progress: Progress = lambda *_: None
) -> list[Quality]:
    """Compare each dtype with float32, which comes first in the result.

    The text is cut into chunks. The model reads each chunk alone. Only distributions in its second half
    are compared, so that each has at least half a chunk of context.

    Args:
        plan: what to compare. The reference may be the model that this one was quantized from. Without one it
            is the model itself, so that rounding the weights in its files does not count.
        text: to read.
        dtypes: element types of linear layers. The model is loaded once for each, all at the same time.
        progress: called with chunks done, chunks in all, and tokens read.

    Raises `RequestError` if the text has fewer tokens than a chunk, or the reference another vocabulary.
    """
    checkpoint, chunk, kernels = open_checkpoint(plan.model), plan.chunk, plan.kernels
    chunks = _chunks(checkpoint, text, plan.tokens, chunk)
    against = open_checkpoint(plan.reference) if plan.reference else checkpoint
    size, expected_size = (read_model_config(one).vocab_size for one in (checkpoint, against))
    if size != expected_size:
        raise RequestError(
            f"{plan.model} has {size:,} tokens and {plan.reference} {expected_size:,}; they need the same "
            "vocabulary"
        )
    models: dict[str, Transformer] = {REFERENCE: load_model(against, REFERENCE, kernels=kernels)}
    for dtype in dtypes:
        if dtype not in models:
            models[dtype] = load_model(checkpoint, dtype, kernels=kernels, kv_dtype=plan.kv_dtype)
    sums = {name: np.zeros(3) for name in models}
    meter = Meter(progress, len(chunks))
    meter.advance()
    for ids in chunks:
        expected = _log_probabilities(models[REFERENCE], ids)
        for name, loaded in models.items():
            found = expected if name == REFERENCE else _log_probabilities(loaded, ids)
            sums[name] += _compare(expected, found, ids)
        meter.advance(1, chunk)
    compared = len(chunks) * (chunk - 1 - chunk // 2)
    return [_quality(name, models[name], compared, sums[name] / compared) for name in models]


def _chunks(checkpoint: Checkpoint, text: str, tokens: int, chunk: int) -> np.ndarray:
    """Token ids `[chunks, chunk]`. A special token that begins texts replaces the first of each chunk."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise ModelError("the model has no tokenizer, and quality is measured on text")
    begin = tokenizer.encode("")
    ids = np.fromiter(islice(encode_text(text, tokenizer), tokens), np.int64)
    count = len(ids) // chunk
    if count < 1:
        raise RequestError(f"{len(ids)} tokens of text are less than one chunk of {chunk}; read more")
    chunks: np.ndarray = ids[: count * chunk].reshape(count, chunk)
    chunks[:, : len(begin)] = begin
    return chunks


@torch.no_grad()
def _log_probabilities(model: Transformer, ids: np.ndarray) -> Tensor:
    """Log-probabilities of the tokens in the second half of a chunk: `[rows, vocabulary]`, float32."""
    batch = model.pack([Rows(ids, 0)])
    hidden, _ = model(batch)
    return model.logits(hidden[len(ids) // 2 : -1]).float().log_softmax(-1)


def _compare(expected: Tensor, found: Tensor, ids: np.ndarray) -> np.ndarray:
    """Sums over tokens: the negative log-likelihood, the divergence, and equal best tokens."""
    targets = torch.as_tensor(ids[-len(found) :])[:, None]
    loss = -found.gather(1, targets).double().sum()
    divergence = (expected.exp() * (expected - found)).sum(-1, dtype=torch.float64).sum()
    equal = (expected.argmax(-1) == found.argmax(-1)).sum()
    return np.array([float(loss), float(divergence), float(equal)])


def _quality(name: str, model: Transformer, compared: int, means: np.ndarray) -> Quality:
    loss, divergence, equal = map(float, means)
    layers = linear_layers(model)
    held = sum(held_bytes(layer) for layer, _ in layers)  # without the embeddings
    bits = 8 * held / sum(shape.numel() for _, shape in layers)
    return Quality(name, bits, compared, float(np.exp(loss)), divergence, equal)
