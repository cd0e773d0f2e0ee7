"""Fills in the engine's numbers that depend on the model and on the machine's memory."""

import platform
from collections.abc import Sequence
from dataclasses import replace

from soothsay.config import EngineConfig, memory_size
from soothsay.core.cache import kv_bytes
from soothsay.errors import ModelError
from soothsay.machine import memory_of
from soothsay.model.transformer import Transformer

MEMORY_SHARE, MEMORY_SHARE_OF_GPU = 1 / 4, 4 / 5
"""Largest share of the free memory that the KV pool takes unless it is told its size. The rest is for
activations, drafters and other programs."""

WORKING_MEMORY = 2**27
"""Bytes that are left to libraries and activations in any case. Small models take 60 to 130 MB for them."""

LEAST_TOKEN_BYTES = 256
"""Bytes that a token counts for, where no layer has keys and values: its place in tables."""

STATE_SHARE = 1 / 16
"""The same for the states of requests, where a model has them; and for snapshots of states."""


def complete_config(config: EngineConfig, model: Transformer) -> EngineConfig:
    """Return `config` with `max_context` and `kv_tokens` filled in, the latter a multiple of `block_size`.

    For a model with states, `snapshot_bytes` is filled in too, and `max_requests` is no more than there is
    memory for.

    Raises `ModelError` if there is no memory for a KV pool.
    """
    context = config.max_context or model.spec.max_positions
    config = _with_states(config, model)
    size = None if config.kv_memory is None else memory_size(config.kv_memory)
    if config.kv_tokens is not None:
        tokens = -(-config.kv_tokens // config.block_size) * config.block_size
        _check_memory(tokens, f"kv_tokens={config.kv_tokens:,}", config, model)
    elif isinstance(size, int):
        tokens = size // _token_bytes(model.spec.kv_shapes, model)
        _check_memory(tokens, f"kv_memory={config.kv_memory!r}", config, model)
    elif size is not None:
        tokens = _affordable_tokens(config, model, size)
    else:
        share = MEMORY_SHARE if model.device.type == "cpu" else MEMORY_SHARE_OF_GPU
        tokens = min(context * config.max_requests, _affordable_tokens(config, model, share))
    blocks = max(tokens // config.block_size, 1)
    return replace(config, max_context=context, kv_tokens=blocks * config.block_size, kv_memory=None)


def num_snapshots(config: EngineConfig, model: Transformer) -> int:
    """Copies of states that `snapshot_bytes` is enough for."""
    if not model.spec.states or not config.prefix_caching:
        return 0
    return (config.snapshot_bytes or 0) // model.spec.state_bytes(model.dtype.itemsize)


def _with_states(config: EngineConfig, model: Transformer) -> EngineConfig:
    """The configuration with numbers that fit the states of a model, if it has any."""
    if not model.spec.states:
        return config
    memory = memory_of(model.device)
    share = int(_free(memory.free) * STATE_SHARE / config.engines)
    state = model.spec.state_bytes(model.dtype.itemsize)
    one = state + config.max_tree * model.spec.journal_bytes(model.dtype.itemsize)
    if share < one:
        raise ModelError(
            f"no memory of {memory.whole} is left for states ({one} bytes a request); use a smaller model"
        )
    requests, copies = min(config.max_requests, share // one), config.snapshot_bytes
    if copies is None:
        copies = min(share, 2 * requests * state)
    return replace(config, max_requests=requests, snapshot_bytes=copies)


def _check_memory(tokens: int, given: str, config: EngineConfig, model: Transformer) -> None:
    """Raise `ModelError` if a KV pool of `tokens` needs more than all free memory, or holds no block."""
    most, each = _affordable_tokens(config, model, 1.0), _token_bytes(model.spec.kv_shapes, model)
    if tokens > most:
        raise ModelError(
            f"{given} needs {tokens * each / 1e9:,.1f} GB, and what is free of "
            f"{memory_of(model.device).whole} holds {most:,} tokens; lower it, or leave it out"
        )
    if tokens < config.block_size:
        least = config.block_size * each
        small = f"{given} is too small: {config.block_size} tokens take {least:,} bytes"
        raise ModelError(f"{small}; 4GiB is a size with a unit")


def _affordable_tokens(config: EngineConfig, model: Transformer, share: float) -> int:
    """The tokens that a KV pool of a share of the free memory holds."""
    shapes = model.spec.kv_shapes
    stages = [(model.own.layers, memory_of(model.device).free, platform.node())]
    stages += [(stage.layers, stage.memory, stage.machine) for stage in model.rest]
    affordable = []
    for layers, memory, machine in stages:
        sharing = config.engines * sum(other == machine for _, _, other in stages)
        per_token = _token_bytes(shapes[layers.start : layers.stop], model)
        affordable.append(int(_free(memory) * share / sharing) // per_token)
    if min(affordable) < config.block_size:
        per_token, whole = _token_bytes(shapes, model), memory_of(model.device).whole
        raise ModelError(
            f"no memory of {whole} is left for the KV pool ({per_token} bytes a token); use a smaller model"
        )
    return min(affordable)


def _token_bytes(shapes: Sequence[tuple[int, int]], model: Transformer) -> int:
    """Bytes of a token in layers of these shapes."""
    return kv_bytes(shapes, model.kv_dtype) or LEAST_TOKEN_BYTES


def _free(memory: int) -> int:
    """What there is for pools, of the memory that can be allocated."""
    return max(memory - WORKING_MEMORY, 0)
