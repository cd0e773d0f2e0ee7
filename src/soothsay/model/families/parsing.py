"""How the `config.json` of each family becomes a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping

from soothsay.errors import ModelError
from soothsay.model.families.fields import checked_fields
from soothsay.model.families.layer_fields import Raw
from soothsay.model.families.table import FAMILIES, UNSUPPORTED
from soothsay.model.families.text_defaults import completed
from soothsay.model.specs.model_spec import ModelSpec

NO_DECODERS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""Ends of names in `architectures` of models with another head than one for tokens."""


def parse_model_config(raw: Raw) -> ModelSpec:
    """Turn the content of a Hugging Face `config.json` into a `ModelSpec`.

    Raises `ModelError`, which names what is missing, unknown or out of range.
    """
    text = raw.get("text_config")
    _require_family(text if isinstance(text, Mapping) else raw)  # before fields, which may mean other things
    if isinstance(text, Mapping):
        raw = {**raw, "text_config": completed(text)}
    raw = checked_fields(raw)
    if "text_config" in raw:  # a multimodal wrapper, such as gemma3: the decoder's part is inside
        shared = "tie_word_embeddings", "architectures"
        outer: Raw = {key: raw[key] for key in shared if key in raw}
        raw = {**raw["text_config"], **outer}
    _require_decoder(raw)
    name = str(raw["model_type"])
    try:
        return FAMILIES[name](raw)
    except KeyError as error:
        raise ModelError(f"config.json of family {name!r} has no {error.args[0]!r}") from None


def _require_decoder(raw: Raw) -> None:
    """Raises `ModelError` for a model whose tokens see later ones, or that has no output head for tokens."""
    for key, encodes in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        if raw.get(key) in encodes:
            raise ModelError(
                f"config.json: {key} {raw[key]!r} makes an encoder, not a decoder; it writes no text"
            )
    for name in raw.get("architectures") or ():
        if str(name).endswith(NO_DECODERS):
            raise ModelError(
                f"config.json: a {name:.80} judges texts, and writes none; take the causal model"
            )


def _require_family(raw: Raw) -> None:
    """Raises `ModelError` for a family that is not supported."""
    name = raw.get("model_type") or ""
    if isinstance(name, str) and name in FAMILIES:
        return
    named = f"model_type {name!r:.80}" if name else f"architectures {raw.get('architectures')!r:.80}"
    if isinstance(name, str) and name in UNSUPPORTED:
        raise ModelError(f"{named} is not supported: {UNSUPPORTED[name]}")
    raise ModelError(f"{named} is not a family that soothsay knows: {', '.join(FAMILIES)}")
