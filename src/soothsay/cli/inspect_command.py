"""`soothsay inspect`: show what a model is and needs, from its configuration and headers alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from soothsay.cli.terminal import facts_table, notice, sampling_summary, say, tell_bundled, try_drafters
from soothsay.config import DType, EngineConfig, KVDType
from soothsay.errors import DrafterError, MissingDrafterError, ModelError
from soothsay.files import user_path
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.specs.state_specs import (
    BesideStatesSpec,
    ConvolutionSpec,
    DeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)
from soothsay.options import BUNDLED, MODEL, ModelOptions, common, option, optional, shared

if TYPE_CHECKING:
    from soothsay.drafters.base import Target
    from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
    from soothsay.model.ops.kernels import Kernels
    from soothsay.model.transformer import Transformer
    from soothsay.model.weights.checkpoint import Checkpoint
    from soothsay.model.weights.numeric_mode import NumericMode
    from soothsay.tokenizer import Tokenizer


Rows = Iterator[tuple[str, str]]

MAX_MODULES = 100_000
"""Limit of layers and experts in a config.json without weights. Kimi K2 has 23,000."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a model is, how it would run here, what memory it needs and which drafters fit.

    The weights are not loaded. A config.json alone tells all but the drafters.
    """

    model: str | None = common(
        "model", help=f"{MODEL} Or a config.json alone.", default=None, show_default=BUNDLED
    )
    context: int | None = optional("the model's", min=2)
    """Tokens of a request, to reckon its memory."""

    requests: int = option(EngineConfig.max_requests, min=1)
    """Requests at a time, to reckon their memory."""

    drafter: str | None = option(None, "-d")
    """Does this one fit? A spec, which is built, or a trained drafter's directory."""

    dtype: DType = shared(ModelOptions, "dtype")
    kv_dtype: KVDType = shared(ModelOptions, "kv_dtype")
    kernels: str = shared(ModelOptions, "kernels")

    def run(self) -> None:
        """Print the facts."""
        model = self.model or BUNDLED
        with notice(f"inspecting {model} ..."):
            file = user_path(model)
            alone = file.suffix == ".json" and file.is_file()
            rows = self._of_config(file) if alone else self._of_model(model)
        tell_bundled(self.model, "soothsay inspect smollm2")
        say(facts_table([("model", model), *rows]))

    def _of_model(self, model: str) -> list[tuple[str, str]]:
        import torch

        from soothsay.drafters.base import Target
        from soothsay.model.transformer import Transformer
        from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
        from soothsay.model.weights.load import for_context

        checkpoint = open_checkpoint(model)
        config, tokenizer = for_context(read_model_config(checkpoint), self.context), checkpoint.tokenizer()
        with torch.device("meta"):
            shapes = Transformer(config)
        engine = EngineConfig(max_context=self.context or config.max_positions)
        return [
            *architecture(config),
            *_files(checkpoint),
            *_texts(checkpoint, tokenizer),
            *self._needs_of(checkpoint, shapes),
            *_drafters(Target(shapes, tokenizer, engine, num_blocks=1, path=checkpoint.path), self.drafter),
        ]

    def _of_config(self, file: Path) -> list[tuple[str, str]]:
        """What a config.json alone tells. Raises `ModelError` if a model of it would be refused."""
        import torch

        from soothsay.files import read_json_object
        from soothsay.model.families.parsing import parse_model_config
        from soothsay.model.kernel_sets import chosen_kernels
        from soothsay.model.transformer import Transformer
        from soothsay.model.weights.load import for_context, weight_bytes
        from soothsay.model.weights.numeric_mode import declared_mode

        raw = read_json_object(file)
        try:
            config = for_context(parse_model_config(raw), self.context)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from error
        experts = sum(own.routing.count for own in config.parts(ExpertsSpec).values())
        if config.num_layers + experts > MAX_MODULES:
            raise ModelError(f"{file} promises {experts:,} experts; {MAX_MODULES:,} are the limit here")
        mode, kernels = declared_mode(raw, file, self.dtype), chosen_kernels(self.kernels, config)
        with torch.device("meta"):
            shapes = Transformer(config)
        weights = f"{decimal(weight_bytes(shapes, mode))} in memory"
        parameters = "parameters", _short(config.num_parameters)
        return [*architecture(config), parameters, *self._needs(config, mode, kernels, mode.name, weights)]

    def _needs(self, config: ModelSpec, mode: NumericMode, kernels: Kernels, how: str, weights: str) -> Rows:
        """How a model runs here, and its memory."""
        from soothsay.core.cache import kv_bytes

        yield from (("runs here", how), ("kernels", kernels.name), ("weights", weights))
        token = kv_bytes(config.kv_shapes, mode.kv_dtype(config, kernels, self.kv_dtype))
        context, requests = self.context or config.max_positions, self.requests
        one = f"{decimal(token)} a token, {decimal(token * context)} for a context of {context:,}"
        many = f"\n{decimal(token * context * requests)} for {requests} of these requests"
        yield "KV cache", one + (many if requests > 1 else "")
        if config.states:
            size = mode.dtype.itemsize
            state, node = decimal(config.state_bytes(size)), decimal(config.journal_bytes(size))
            yield "states", f"{state} a request and a snapshot, {node} a node of its draft tree"

    def _needs_of(self, checkpoint: Checkpoint, model: Transformer) -> Rows:
        import torch

        from soothsay.model.kernel_sets import chosen_kernels
        from soothsay.model.weights.load import table_bytes, weight_bytes
        from soothsay.model.weights.numeric_mode import numeric_mode
        from soothsay.model.weights.tensor_names import TensorNames

        names, kernels = TensorNames(model.spec, checkpoint), chosen_kernels(self.kernels, model.spec)
        mode = numeric_mode(names, self.dtype)
        probe = kernels.linear(mode.convert("probe", torch.zeros(64, 64)), None, mode.dtype)
        embeddings, held = table_bytes(names, mode), weight_bytes(model, mode, names=names)
        weights = f"{decimal(held)} in memory, {decimal(embeddings)} of embeddings mapped"
        return self._needs(model.spec, mode, kernels, f"{mode.name}; linear layers {probe.name}", weights)


def _files(checkpoint: Checkpoint) -> Rows:
    path = checkpoint.path
    stored: Counter[str] = Counter()
    for kind, count in checkpoint.stored():
        stored[kind] += count
    total = sum(stored.values())
    kinds = ", ".join(f"{count / total:.1%} {kind}" for kind, count in stored.most_common())
    yield "parameters", f"{_short(total)}, stored as {kinds if len(stored) > 1 else next(iter(stored))}"
    files = checkpoint.files
    where = path if len(files) == 1 else f"{len(files)} files in {files[0].parent}"
    yield "on disk", f"{decimal(checkpoint.num_bytes())}, {where}"


def _texts(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> Rows:
    if tokenizer is None:
        yield "tokenizer", "none: prompts have to be token ids"
        ends = [str(token) for token in checkpoint.eos_ids]
    else:
        template = "with a" if tokenizer.has_chat_template else "without a"
        yield "tokenizer", f"{len(tokenizer):,} tokens, {template} chat template"
        named = tokenizer.backend.id_to_token
        ends = [f"{token} {named(token)}" for token in tokenizer.end_ids(checkpoint.eos_ids)]
    yield "end tokens", ", ".join(ends) or "none: answers end at max_tokens"
    if defaults := sampling_summary(checkpoint.sampling_defaults()):
        yield "sampling", f"{defaults}, by default"


def _drafters(target: Target, asked: str | None) -> Rows:
    """Yield the drafters that can be built for a target without weights.

    Raises `DrafterError` if one drafter is asked for and it cannot be built.
    """
    from soothsay.drafters.registry import REGISTRY, build_drafter

    if asked and asked not in REGISTRY and user_path(asked).is_dir():
        yield from _trained(target, asked)
        return
    if asked:
        nodes = min(build_drafter(asked, target).max_nodes, EngineConfig.max_tree)
        trees = f"trees of up to {nodes} nodes" if nodes > 1 else "plain decoding"
        yield "drafters", f"✓ {asked}, {trees}"
        return
    built = try_drafters(target)
    fitting = [name for name, drafter in built.items() if not isinstance(drafter, DrafterError)]
    missing = [name for name, drafter in built.items() if isinstance(drafter, MissingDrafterError)]
    lines = [f"✓ {', '.join(fitting)}"] if fitting else []
    lines += [f"✗ {name}: {built[name]}" for name in built if name not in (*fitting, *missing)]
    if missing:
        lines += [f"- no files beside the model: {', '.join(missing)}. 'soothsay train' makes some of them"]
    yield "drafters", "\n".join(lines)


def _trained(target: Target, path: str) -> Rows:
    """Facts about a trained drafter, whose weights are not read. Raises `DrafterError` if it does not fit."""
    from soothsay.drafters.heads.checkpoints.head_directory import open_head

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_head(path, target) as found:
            facts = [*_facts(found, path)]
    yield from facts
    if caught:
        yield "note", "\n".join(str(warning.message) for warning in caught)


def _facts(found: StoredHead, path: str) -> Rows:
    config, view = found.fit.config, found.fit.view
    yield "drafter", f"{found.method}: {found.layout}"
    yield "its weights", f"{_short(found.parameters)} parameters, stored as {found.dtype}"
    taps = [f"what goes into layer {tap}" for tap in found.head.taps if tap < config.num_layers]
    taps += ["what comes out of the last layer"] * (config.num_layers in found.head.taps)
    yield "reads", ", ".join(taps)
    if view is not None:
        part = f"the first {view.size:,} of {view.target_hidden_size:,} dimensions"
        yield "view", f"{part}, with an embedding and output head of its own"
    if found.draft_vocabulary is not None:
        yield "can say", f"{found.draft_vocabulary:,} of {config.vocab_size:,} tokens"
    methods = ("eagle", "eagle2") if found.method == "eagle" else (found.method,)
    yield "drafters", "\n".join(f"✓ fits: --drafter '{method}(model={path})'" for method in methods)


def _short(count: int) -> str:
    """Format a number with a unit: 15735168 is "15.7M"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def architecture(c: ModelSpec) -> Rows:
    """What a model computes: a name and a sentence for each fact. An empty name continues the one before."""
    dense, mixtures = c.parts(DenseSpec), c.parts(ExpertsSpec)
    sizes = sorted({part.size for part in dense.values()})
    yield "family", c.family
    units = f", {' and '.join(f'{size:,}' for size in sizes)} feed-forward" if sizes else ""
    yield "layers", f"{c.num_layers} of {c.hidden_size:,} hidden{units}"
    if c.source is not None:
        count = c.source.encoder.num_layers
        yield "encoder", f"{count} layers, which read the prompt as a whole; the answer is written to it"
    if mixtures:
        e = c.first(ExpertsSpec)
        beside = "" if e.shared is None else f", and {e.shared.size:,} for all tokens"
        chosen = f"{e.routing.chosen} for each token{beside}, in {len(mixtures)} layers"
        yield "experts", f"{e.routing.count} of {e.expert.size:,}, {chosen}"
    yield from _mixers(c)
    if (alternating := c.layers[0].alternating) is not None:
        yield "streams", f"{alternating.parts} of {c.hidden_size:,}, predicted and corrected in each layer"
    if c.num_sharing_layers:
        yield "shared KV", f"the last {c.num_sharing_layers} layers read that of layers before them"
    tied = "the head shares the embedding" if c.head.tied else "with a head of its own"
    yield "vocabulary", f"{c.vocab_size:,} tokens, {tied}"
    yield "context", f"{c.max_positions:,} tokens"
    yield from _rotary(c)
    yield "blocks", _blocks(c)
    for size, count in Counter(window for window in c.windows if window is not None).items():
        kind = "window" if size > 0 else "chunks"
        yield kind, f"{abs(size):,} tokens in {count} of {c.num_layers} layers"


MIXERS: Mapping[type[Any], tuple[str, str]] = {
    LatentSpec: ("attention", "{0.heads} heads over latent states of {0.rank} and {0.rotated} rotated"),
    DeltaSpec: (
        "recurrent",
        "{layers}, {0.value_heads} heads with states of {0.key_size} x {0.value_size}",
    ),
    StateSpaceSpec: (
        "recurrent",
        "{layers} of Mamba-2{beside}, {0.heads} heads with states of {0.head_size} x {0.state_size}",
    ),
    SelectiveSpec: ("recurrent", "{layers} of Mamba, {0.size:,} channels with states of {0.state_size}"),
    ConvolutionSpec: ("convolutions", "{layers}, over {0.taps} tokens"),
}
"""What is told of mixers other than attention: a name, and a sentence about the first of a kind."""


def _mixers(c: ModelSpec) -> Rows:
    """The parts in which tokens read what came before them."""
    read = sorted(c.parts(AttentionSpec).values(), key=lambda own: own.window is None)
    if read:
        own, other = read[0], read[-1]
        sinks = ", each with a sink" if own.sinks else ""
        yield "attention", f"{own.heads} heads of {own.size}, {own.kv_heads} for keys and values{sinks}"
        if other.kv_shape != own.kv_shape or other.keys_are_values:
            values = ", values are keys" if other.keys_are_values else ""
            heads = f"{other.kv_heads} heads of {other.size} for keys{values}"
            yield "", f"{heads}, in layers without a window"
    layers = f"{len(c.states)} of {c.num_layers} layers"
    beside = " beside attention" if isinstance(c.layers[0].mixer, BesideStatesSpec) else ""
    for kind, (name, told) in MIXERS.items():
        for part in list(c.parts(kind).values())[:1]:
            yield name, told.format(part, layers=layers, beside=beside)


def _rotary(c: ModelSpec) -> Rows:
    counts = Counter(layer.attention.rotation for layer in c.layers if layer.attention is not None)
    main = c.rotation
    rope, kind = main.rope, main.rope.kind
    scaling = "not scaled" if kind == "default" else f"scaled by {kind}, factor {rope.factor:g}"
    if kind == "longrope":
        which = "long" if rope.context > rope.original_max_positions else "short"
        scaling += f", {which} factors (short with max_context={rope.original_max_positions} or less)"
    part = "" if main.rotated is None else f", {main.rotated} of {main.size} dimensions"
    places, relative = c.embedding.positions, any(part.relative for part in c.parts(AttentionSpec).values())
    learned = "" if places is None else f", positions are {'learned' if places.waves is None else 'waves'}"
    none = f"none{learned}{', scores have numbers by distance' if relative else ''}"
    yield "rotary", none if kind == "none" else f"base {rope.theta:,.0f}, {scaling}{part}"
    for other, count in counts.items():
        if other != main:
            base = "none" if other.rope.kind == "none" else f"base {other.rope.theta:,.0f}"
            yield "", f"{base} in {count} of {c.num_layers} layers"


def _blocks(c: ModelSpec) -> str:
    first, number = c.layers[0], sum(layer.mixer is None for layer in c.layers)
    if number or first.mlp is None:
        return f"a single part each, the feed-forward part in {number} of {c.num_layers}; a norm before it"
    norms = "around" if first.pre_norms and first.post_norms else "before" if first.pre_norms else "after"
    between = "beside" if first.parallel else "then"
    return f"attention, {between} the feed-forward part; norms {norms} them"
