"""A larger model that computes the same function (Net2Net, Chen et al. 2015, arXiv 1511.05641).

It has the small model's outputs at a large model's cost, so that benchmarks of speed have real predictions
and real acceptance.

New dimensions of the residual stream stay zero: embeddings have zero columns there, and each projection that
writes into the stream has zero rows. New heads and new units of the feed-forward part meet zero columns of
the next output projection. New blocks are spread evenly between the old ones. Their output projections are
zero, so they add nothing.

All other new weights are multiplied by one of these zeros, so any finite values are correct. They are noise
as large as the weights that they continue, and a new block is a copy of the old block before it. So no
processor and no engine computes them faster than a real model's: zeros are only in embeddings, in output
projections and in the stream's new dimensions.
"""

# The norms. Let D values of the stream become s * x, with zeros after them up to D'. In most families s is
# 1. Gemma multiplies its embeddings by sqrt(D), as their dtype rounds it: there s is sqrt(D') / sqrt(D).
#
# The mean square m becomes c * m, where c = s^2 D / D'. With eps' = c * eps,
#
#     w' s x / sqrt(c m + c eps)  =  w' sqrt(D' / D)  x / sqrt(m + eps),
#
# which is what it was if w' = w sqrt(D / D'). Two kinds of norms do not read the stream, but have its eps':
#
# - Those of queries and keys (Qwen3, Gemma 3) are as wide as a head, as before. Queries and keys are
#   multiplied by sqrt(c), hence their mean squares by c, and w' = w.
# - Norms after a part of a block (Gemma) read the part's output, which is multiplied by s like the stream.
#   Their output should be s times the old one: w' = w sqrt(c).
#
# In 16 bits a factor that is no power of two would round every weight, which changes more than eps does. So
# a factor f of the last two kinds is replaced by the nearest power of two, p. Norms do not depend on the
# scale of their input: the only effect is an eps that is (f / p)^2 times as large, between 1/2 and 2.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soothsay.bench.grown_drafters import GrownDrafters, Growth, grow_drafters
from soothsay.bench.grown_tensors import Axis, GrownShape, GrownTensor, Rule
from soothsay.errors import ModelError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.weight_format import Reader
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.checkpoint import Checkpoint, read_model_config
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.model.weights.writing import writing

GROWABLE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families whose blocks can grow."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A grown model on disk."""

    path: Path
    shape: GrownShape
    parameters: int
    bytes: int
    """Size of all weights."""

    drafters: GrownDrafters


def grow(
    checkpoint: Checkpoint,
    shape: GrownShape,
    out: Path,
    *,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Grown:
    """Write a model of `shape` that computes what `checkpoint` computes, as a Hugging Face directory.

    Outputs are equal up to float32's rounding, in engines that compute norms with float32 weights as ours
    does. Weights keep their dtype, and 16-bit weights are not rounded. Norms are scaled and stored in
    float32. Blocks of integers (GGUF) become float32 of the same values. Equal checkpoints give equal files.
    One file's weights are in memory at a time.

    Drafters beside the small model are written beside the grown one, fitted to it: see `grow_drafters`.

    Args:
        checkpoint: a directory with weights of floating point, or a GGUF file, of a family without experts.
        shape: no smaller than the model anywhere; see `GrownShape.parse`.
        out: a directory that is empty or not there yet.
        source: the name that the checkpoint was opened by, for the model card; None: its directory's name.
        progress: called with the bytes made so far and in all.

    Raises:
        ModelError: the checkpoint cannot grow or is damaged, it cannot have this shape, `out` is in use, or
            its disk is too small.
    """
    config, tensors, growth = _plan(checkpoint, shape)
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    with writing(out, total) as writer:
        for tensor in tensors:
            with checkpoint.open() as read:  # opened anew, so that the pages are given back after it
                writer.add({tensor.name: tensor.make(read)})
            done += tensor.nbytes
            if progress:
                progress(done, total)
        writer.finish(checkpoint, config)
        card = _card(source or checkpoint.path.name, shape)
        (writer.directory / "README.md").write_text(card, encoding="utf-8")
        drafters = grow_drafters(checkpoint, growth, writer.directory / "drafters", out.name)
    return Grown(out, shape, sum(math.prod(tensor.shape) for tensor in tensors), total, drafters)


def _plan(checkpoint: Checkpoint, shape: GrownShape) -> tuple[dict[str, Any], list[GrownTensor], Growth]:
    """The grown model's config.json, its tensors in order, and where the small model's hidden states are.

    Raises `ModelError` if the model cannot grow to this shape.
    """
    old = read_model_config(checkpoint)
    _require_growable(checkpoint, old)
    _require_fit(old, shape)
    names = TensorNames(old, checkpoint)
    with checkpoint.open() as read:
        embeddings = read(names.require("embedding")[0]).dtype
        raw = _config(checkpoint.config, old, shape)
        stream = _embedding_scale(parse_model_config(raw), embeddings) / _embedding_scale(old, embeddings)
        squares = stream**2 * old.hidden_size / shape.hidden  # c, at the top of this file
        raw["rms_norm_eps"] = old.norm.eps * squares
        outer, block = _rules(old, shape, stream, squares)
        origins = _origins(old, shape)
        tensors = list(_tensors(names, read, outer, block, origins))
    layers = [*(origins.index(layer) for layer in range(old.num_layers)), shape.layers]
    return raw, tensors, Growth(shape.hidden, stream, layers)


def _embedding_scale(config: ModelSpec, dtype: torch.dtype) -> float:
    """The embeddings' factor, rounded to their dtype as in training and in loading."""
    return float(torch.tensor(config.embedding.scale, dtype=dtype))


def _require_growable(checkpoint: Checkpoint, old: ModelSpec) -> None:
    path = checkpoint.path
    if old.family not in GROWABLE:
        known = ", ".join(GROWABLE)
        raise ModelError(f"{path}: a model of family {old.family} cannot grow, only one of {known}")
    if open_format(checkpoint.config, path) is not None:
        raise ModelError(f"{path} is quantized and cannot grow; grow the model that it was made from")


def _require_fit(old: ModelSpec, shape: GrownShape) -> None:
    for (name, now), wanted in zip(asdict(GrownShape.of(old)).items(), asdict(shape).values(), strict=True):
        if wanted < now:
            raise ModelError(f"{name}={wanted} is less than the {now} that the model has: it can only grow")
    if shape.heads % shape.kv_heads:
        raise ModelError(f"heads={shape.heads} cannot share kv_heads={shape.kv_heads} evenly")
    if shape.hidden % shape.heads:  # transformers refuses it, although heads have a size of their own
        raise ModelError(f"hidden={shape.hidden} is not a multiple of heads={shape.heads}")
    size = old.first(AttentionSpec).size
    ordinary = old.first(AttentionSpec).heads * size == old.hidden_size
    if ordinary and shape.heads * size != shape.hidden:
        raise ModelError(
            f"heads={shape.heads} of {size}, a size that cannot change, do not make up "
            f"hidden={shape.hidden}, as they do in this model: it takes {shape.hidden / size:g} heads"
        )


def _origins(old: ModelSpec, shape: GrownShape) -> list[int]:
    """The old block of each new block. The first new block with the same old block is it, others copy it."""
    return [layer * old.num_layers // shape.layers for layer in range(shape.layers)]


def _config(raw: Mapping[str, Any], old: ModelSpec, shape: GrownShape) -> dict[str, Any]:
    """The config.json without the norms' eps. For a multimodal model it is the decoder's."""
    if "text_config" in raw:
        tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {**raw["text_config"], **tied, "architectures": ["Gemma3ForCausalLM"]}
    config = {
        **raw,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": old.first(AttentionSpec).size,
        "intermediate_size": shape.intermediate,
    }
    if any(old.windows) or "layer_types" in raw:  # a block keeps its window wherever it goes
        kinds = ["full_attention" if window is None else "sliding_attention" for window in old.windows]
        config["layer_types"] = [kinds[origin] for origin in _origins(old, shape)]
    return config


_Rules = dict[str, list[Rule]]
"""For each of our modules, the rules of the tensors that make it up."""


def _rules(old: ModelSpec, shape: GrownShape, stream: float, squares: float) -> tuple[_Rules, _Rules]:
    """The rules outside of blocks, and those of a block. `stream` is s and `squares` is c, see the top."""
    width = Axis.first(old.hidden_size, shape.hidden)
    vocabulary = Axis.first(old.vocab_size, old.vocab_size)
    size, normed = old.first(AttentionSpec).size, old.first(AttentionSpec).norms is not None
    head = Axis.first(size, size)
    units = Axis.first(old.first(DenseSpec).size, shape.intermediate)
    queries, keys = _heads(old, shape)
    centre = 1.0 if old.zero_centred_norms else 0.0

    def norm(axis: Axis, factor: float = 1.0) -> list[Rule]:
        return [Rule((axis,), factor, fill=1.0 - centre, centre=centre)]

    reading = norm(width, math.sqrt(old.hidden_size / shape.hidden))
    table = vocabulary, width
    outer = {"embedding": [Rule(table, fill=0.0)], "norm": reading, "head": [Rule(table)]}
    per_head = math.sqrt(squares) if normed else 1.0
    block = {
        "attention_norm": reading,
        "attention.qkv": [
            Rule((queries, width), per_head),
            Rule((keys, width), per_head),
            Rule((keys, width)),
        ],
        "attention.o": [Rule((width, queries), stream, fill=0.0)],
        "mlp_norm": reading,
        "mlp.gate_up": [Rule((units, width))] * 2,
        "mlp.down": [Rule((width, units), stream, fill=0.0)],
    }
    if normed:
        block |= {"attention.q_norm": norm(head), "attention.k_norm": norm(head)}
    if old.layers[0].post_norms:
        writing = norm(width, math.sqrt(squares))
        block |= {"attention_post_norm": writing, "mlp_post_norm": writing}
    return outer, block


def _heads(old: ModelSpec, shape: GrownShape) -> tuple[Axis, Axis]:
    """Place query heads and key-value heads: each query head in a group with its keys and values.

    If the new groups are smaller, key-value heads get copies. Raises `ModelError` if that takes more heads
    than there are.
    """
    c, group = old.first(AttentionSpec), shape.heads // shape.kv_heads
    copies = -(-old.group // group)
    if copies * c.kv_heads > shape.kv_heads:
        raise ModelError(
            f"heads={shape.heads} with kv_heads={shape.kv_heads} are groups of {group}: for the model's "
            f"groups of {old.group} it takes {copies * c.kv_heads} key-value heads, or larger groups"
        )
    queries, keys = {}, {}
    for head in range(c.heads):
        key, member = divmod(head, old.group)
        place = key * copies + member // group
        keys[place] = key
        queries[place * group + member % group] = head
    of_queries = Axis.heads(c.heads, shape.heads, c.size, queries)
    return of_queries, Axis.heads(c.kv_heads, shape.kv_heads, c.size, keys)


def _tensors(
    names: TensorNames, read: Reader, outer: _Rules, block: _Rules, origins: Sequence[int]
) -> Iterator[GrownTensor]:
    """All tensors of the grown model, with the names of a text-only decoder."""
    c = names.spec
    biased = {
        "attention.qkv": c.first(AttentionSpec).bias,
        "attention.o": c.first(AttentionSpec).o_bias,
        "mlp.gate_up": c.first(DenseSpec).bias,
        "mlp.down": c.first(DenseSpec).bias,
    }

    def tensors(path: str, module: str, rules: list[Rule], old: str, new: str) -> Iterator[GrownTensor]:
        for suffix in ("weight", "bias") if biased.get(module) else ("weight",):
            for source, rule in zip(names.require(path, suffix), rules, strict=True):
                stored = read(source).dtype
                if not stored.is_floating_point or stored.itemsize < 2:
                    raise ModelError(f"{source} is {stored}; grow the model that it was made from")
                own = rule if suffix == "weight" else rule.bias()
                dtype = stored if rule.centre is None else torch.float32
                yield GrownTensor(new + source.removeprefix(old), source, own, dtype)

    yield from tensors("embedding", "embedding", outer["embedding"], names.prefix, "model.")
    for layer, origin in enumerate(origins):
        adds_nothing = layer > 0 and origins[layer - 1] == origin
        for module, rules in block.items():
            if adds_nothing and module in ("attention.o", "mlp.down"):
                rules = [rule.emptied() for rule in rules]
            old, new = f"{names.prefix}layers.{origin}.", f"model.layers.{layer}."
            yield from tensors(f"blocks.{origin}.{module}", module, rules, old, new)
    yield from tensors("norm", "norm", outer["norm"], names.prefix, "model.")
    if not c.head.tied:
        yield from tensors("head", "head", outer["head"], names.prefix.removesuffix("model."), "")


def _card(source: str, shape: GrownShape) -> str:
    return (
        f"# {source}, grown\n\n"
        f"This is `{source}`, grown by `soothsay grow` to {shape.layers} layers of {shape.hidden}, "
        f"{shape.heads} heads, {shape.kv_heads} for keys and values, and {shape.intermediate:,} units in the "
        f"feed-forward part (Net2Net, arXiv 1511.05641). It computes the same function as `{source}` "
        "and knows no more than it does, at the cost of a model of this size. It is for speed benchmarks "
        "only.\n"
    )
