"""Specs of feed-forward parts, from the fields of a `config.json`. All raise `ModelError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.layer_choices import Raw, count
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import MLPSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""From a name in `config.json` to ours."""


def activation(raw: Raw, known: Mapping[str, str] = ACTIVATIONS) -> str:
    """Our name of the file's activation."""
    name = raw.get("hidden_act", "silu")
    if name not in known:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(known)}")
    return known[name]


def dense(raw: Raw, known: Mapping[str, str] = ACTIVATIONS, **own: Any) -> list[DenseSpec]:
    """The dense part of each layer. `own`: fields in which a family's layers differ from Llama's."""
    part = DenseSpec(
        int(raw["intermediate_size"]), activation(raw, known), bool(raw.get("mlp_bias", False)), **own
    )
    return [part] * count(raw)


def experts(
    raw: Raw,
    *,
    known: Mapping[str, str] = ACTIVATIONS,
    correction: str | None = None,
    shared_size: int | None = None,
    routing: Mapping[str, Any] | None = None,
    **own: Any,
) -> list[MLPSpec]:
    """The part of each layer: a mixture of experts, or dense.

    Args:
        raw: the file.
        known: the activations that the family may have.
        correction: experts are chosen as in DeepSeek-V3: by sigmoids, corrected by the tensor of this name.
        shared_size: size of the part beside the experts; None: by `n_shared_experts`.
        routing: fields of the routing in which the family differs.
        own: fields of the mixture in which the family differs.
    """
    plain = dense(raw, known)
    if raw.get("num_local_experts") == 0:
        return [*plain]
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    number = next((int(raw[name]) for name in names if raw.get(name)), 0) or int(raw["num_experts"])
    used, size = (
        int(raw["num_experts_per_tok"]),
        int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
    )
    groups, kept = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    group_best = 1 if correction is None else 2
    if not 1 <= used <= number:
        raise ModelError(f"config.json: num_experts_per_tok is {used}, and there are {number} experts")
    if (
        number % groups
        or kept > groups
        or used > number // groups * kept
        or 1 < groups > number // group_best
    ):
        raise ModelError(
            f"config.json: {used} of {number} experts cannot be chosen from {kept} (topk_group) of {groups} "
            "groups (n_group)"
        )
    if shared_size is None:
        shared_size = size * int(raw.get("n_shared_experts") or 0)
    fields = {
        "normalize": bool(raw.get("norm_topk_prob", False)),
        "sigmoid": correction is not None,
        "scale": float(raw.get("routed_scaling_factor", 1.0)),
        **(routing or {}),
    }
    kind, bias = plain[0].activation, plain[0].bias
    mixture = ExpertsSpec(
        RoutingSpec(number, used, groups=groups, groups_chosen=kept, group_best=group_best, **fields),
        DenseSpec(size, kind, bias),
        DenseSpec(shared_size, kind, bias) if shared_size else None,
        correction=correction if raw.get("use_expert_bias", True) else None,
        **own,
    )
    return [mixture if sparse else part for sparse, part in zip(_sparse(raw), plain, strict=True)]


def _sparse(raw: Raw) -> list[bool]:
    """For each layer, whether it has experts."""
    listed, first = raw.get("mlp_only_layers") or (), int(raw.get("first_k_dense_replace") or 0)
    step, frequency = int(raw.get("decoder_sparse_step") or 1), int(raw.get("moe_layer_freq") or 1)
    return [
        i >= first and i not in listed and (i + 1) % step == 0 and i % frequency == 0
        for i in range(count(raw))
    ]
