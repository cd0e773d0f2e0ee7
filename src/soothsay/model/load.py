"""Checkpoint names to ours: build a `Transformer` and fill it, one block at a time, from mapped files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.errors import ModelError
from soothsay.model.checkpoint import Checkpoint, Reader
from soothsay.model.kernels import Kernels, StockKernels
from soothsay.model.linear import Dense, LinearKind, Packed
from soothsay.model.transformer import Embedding, RMSNorm, Transformer
from soothsay.native import native_kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    checkpoint: Checkpoint, dtype: DType = "auto", device: torch.device | str = "cpu"
) -> Transformer:
    """Build the model that `checkpoint` holds.

    `dtype` "auto" takes bfloat16 for 16-bit weights where the machine multiplies it fast, and float32
    otherwise. Files are mapped and read once, block by block, so that the peak in memory is the weights and
    one block.

    Raises `ModelError` for an unknown dtype, and for missing tensors or shapes that do not fit the
    configuration.
    """
    config = ModelConfig.from_hf(checkpoint.config)
    names = TensorNames(config, checkpoint)
    target, kind = numeric_mode(names, dtype, device)
    with torch.device("meta"):
        model = Transformer(config, best_kernels(config, device))
    if not config.tie_embeddings:
        names.require("head")
    for path in ("embedding", "head", "norm", *(f"blocks.{i}" for i in range(config.num_layers))):
        with checkpoint.open() as read:  # opened anew, so that a block's pages are given back after it
            _fill(model, path, _Source(names, read, target, kind))
    return model.to(device).eval().requires_grad_(False)


def numeric_mode(
    names: TensorNames, dtype: DType = "auto", device: torch.device | str = "cpu"
) -> tuple[torch.dtype, type[Dense] | type[Packed]]:
    """The dtype, and the kind of linear layer, that a checkpoint would run with on `device`."""
    on_cpu = torch.device(device).type == "cpu"
    if dtype in DTYPES:
        target = DTYPES[dtype]
    elif dtype == "auto":
        with names.checkpoint.open() as read:
            stored = read(names.require("blocks.0.attention.o")[0]).dtype
        fast = not on_cpu or Packed.available(torch.bfloat16)
        target = torch.bfloat16 if stored.itemsize == 2 and fast else torch.float32
    else:
        raise ModelError(f"dtype {dtype!r} is unknown; choose auto, {' or '.join(DTYPES)}")
    return target, Packed if on_cpu and Packed.available(target) else Dense


def best_kernels(config: ModelConfig, device: torch.device | str = "cpu") -> Kernels:
    """The fastest that fit: the native kernels on a CPU where they are there, else stock operations."""
    native = native_kernels() if torch.device(device).type == "cpu" else None
    return StockKernels() if native is None or not native.fit(config) else native


class TensorNames:
    """Our module names -> the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint):
        self.config, self.checkpoint = config, checkpoint
        self.all = checkpoint.names()
        embeddings = [name for name in self.all if name.endswith("embed_tokens.weight")]
        if not embeddings:
            raise ModelError(f"{checkpoint.path} has no embed_tokens.weight; is it a decoder's checkpoint?")
        self.prefix = min(embeddings, key=len).removesuffix("embed_tokens.weight")

    def of(self, module: str) -> list[str]:
        """Tensor names, less `.weight` and `.bias`, whose rows together make up `module`."""
        if module == "embedding" or (module == "head" and self.config.tie_embeddings):
            return [f"{self.prefix}embed_tokens"]
        if module == "head":
            return [f"{self.prefix.removesuffix('model.')}lm_head"]
        if module == "norm":
            return [f"{self.prefix}norm"]
        _, layer, *rest = module.split(".")
        return [f"{self.prefix}layers.{layer}.{name}" for name in self._in_block(".".join(rest))]

    def _in_block(self, module: str) -> list[str]:
        mixtral = self.config.family == "mixtral"
        sandwich = self.config.post_norms
        fixed = {
            "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attention.o": ["self_attn.o_proj"],
            "attention.q_norm": ["self_attn.q_norm"],
            "attention.k_norm": ["self_attn.k_norm"],
            "attention_norm": ["input_layernorm"],
            "attention_post_norm": ["post_attention_layernorm"],
            "mlp_norm": ["pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"],
            "mlp_post_norm": ["post_feedforward_layernorm"],
            "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down": ["mlp.down_proj"],
            "mlp.router": ["block_sparse_moe.gate" if mixtral else "mlp.gate"],
        }
        if module in fixed:
            return fixed[module]
        _, _, expert, part = module.split(".")  # mlp.experts.{e}.gate_up or .down
        where = f"block_sparse_moe.experts.{expert}." if mixtral else f"mlp.experts.{expert}."
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        return [where + gate, where + up] if part == "gate_up" else [where + down]

    def require(self, module: str, suffix: str = "weight") -> list[str]:
        """Full tensor names of `module`. Raises `ModelError` for one that is not there."""
        names = [f"{name}.{suffix}" for name in self.of(module)]
        for name in names:
            if name not in self.all:
                raise ModelError(
                    f"{self.checkpoint.path} has no tensor {name!r}, which {self.config.family} with this "
                    "config.json needs; the download is incomplete, or the configuration is another model's"
                )
        return names


class _Source:
    """Reads what a module needs, checks shapes, converts."""

    def __init__(self, names: TensorNames, read: Reader, dtype: torch.dtype, kind: LinearKind):
        self.names, self.read, self.dtype, self.kind = names, read, dtype, kind

    def tensor(self, module: str, suffix: str, expected: Tensor) -> Tensor:
        names = self.names.require(module, suffix)
        parts = [self.read(name) for name in names]
        shapes = [tuple(part.shape) for part in parts]
        rows, rest = sum(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
        if rows != expected.shape[0] or rest != {tuple(expected.shape[1:])}:
            held = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            together = " together" if len(names) > 1 else ""
            raise ModelError(
                f"{self.names.checkpoint.path}: {held}: by config.json it should be "
                f"{list(expected.shape)}{together}"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fill(model: Transformer, path: str, source: _Source) -> None:
    """Give real weights to every leaf module at `path` or below it."""
    for name, module in list(model.get_submodule(path).named_modules(prefix=path)):
        if isinstance(module, Dense):
            weight = source.tensor(name, "weight", module.weight).to(source.dtype)
            bias = None if module.bias is None else source.tensor(name, "bias", module.bias).to(source.dtype)
            model.set_submodule(name, source.kind(weight, bias))
        elif isinstance(module, RMSNorm):
            weight = source.tensor(name, "weight", module.weight).float()
            module.weight = nn.Parameter(weight + 1 if model.config.zero_centred_norms else weight.clone())
        elif isinstance(module, Embedding):  # stays a view of the file: only the rows in use are ever read
            weight = source.tensor(name, "weight", module.weight)
            module.weight = nn.Parameter(weight, requires_grad=False)
            module.scale = float(torch.tensor(module.scale, dtype=weight.dtype))  # as it was trained
