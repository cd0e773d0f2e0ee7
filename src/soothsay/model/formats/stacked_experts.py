"""Experts that a checkpoint of safetensors stacks in one tensor, as one matrix for each expert.

gpt-oss, Llama 4, Qwen3-VL, Qwen3.5, Gemma 4 and Granite stack the matrices of a layer's experts, gate and up
as one matrix:

    NAME.experts.gate_up_proj          [E, in, 2 * size], or [E, 2 * size, in] in Qwen3.5 and Gemma 4
    NAME.experts.gate_up_proj_bias     [E, 2 * size]
    NAME.experts.gate_up_proj_blocks   [E, 2 * size, groups, 16], integers, which are not transposed
    NAME.experts.gate_up_proj_scales   [E, 2 * size, groups]
    NAME.experts.down_proj             [E, size, out], or [E, out, size], and so on
    NAME.input_linear.weight           [E, 2 * size, in] in Granite
    NAME.output_linear.weight          [E, out, size] in Granite

The loader sees `NAME.experts.{e}.gate_proj.weight`, `.bias`, `.blocks` and `.scales`.

MLX stacks each part of all families: `NAME.switch_mlp.gate_proj.weight`, `.scales` and `.biases`, `[E, ...]`.

GPT-2's matrices `NAME.c_attn.weight` are `[in, out]`. The loader sees `NAME.linear_attn.weight`, `[out, in]`.

transformers writes Kimi Linear's dense parts as `NAME.block_sparse_moe.gate_proj.weight`, like its experts.
The loader sees `NAME.mlp.gate_proj.weight`, and so for the tensors of quantized weights.

BART's `final_logits_bias` is `[1, tokens]`. The loader sees the bias of the output head, and of the table.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch

from soothsay.errors import ModelError

Shape = tuple[int, ...]

MAX_TENSORS = 200_000
"""Limit of tensors, experts counted one by one. A model of 36 layers with 128 experts has 28,000."""

STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")
LOGITS_BIAS = "final_logits_bias"
CONVOLUTION = re.compile(r"(.+\.)c_((?:attn|proj|fc)\.(?:weight|bias))")
GRANITE_STACK = re.compile(r"(.+\.block_sparse_moe)\.(input|output)_linear\.weight")
KIMI_DENSE = re.compile(r"(.+\.)block_sparse_moe\.((?:gate|up|down)_proj\..+)")
SWITCH = re.compile(r"(.+)\.switch_mlp\.((?:gate|up|down)_proj\.(?:weight|scales|biases))")


@dataclass(frozen=True, slots=True)
class Stacking:
    """How a family stores gate and up in one matrix."""

    interleaved: bool
    """Outputs of gate and up take turns. Else those of gate come first."""

    transposed: bool | None = True
    """Plain matrices are `[in, out]`. None: some files have them so, and the hidden size tells which."""


_QWEN3_5 = Stacking(interleaved=False, transposed=False)
STACKINGS = {
    "gpt_oss": Stacking(interleaved=True),
    "llama4_text": Stacking(interleaved=False),
    "qwen3_vl_moe_text": Stacking(interleaved=False, transposed=None),
    "gemma4_text": Stacking(interleaved=False, transposed=False),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _QWEN3_5),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "mistral4"), _QWEN3_5),
}
"""By `model_type`."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a tensor of one expert is in a stack, or a tensor of GPT-2's that is transposed."""

    stack: str  # name of the tensor
    expert: int | EllipsisType  # ...: the tensor is no stack
    outputs: slice
    transposed: bool

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of the expert's part of the stack."""
        matrix = matrix.t() if self.transposed else matrix
        return matrix[self.outputs] if matrix.ndim else matrix

    def shape_of(self, stack: Shape) -> Shape:
        """The shape of the tensor, of the shape of the stack."""
        matrix = stack[1:] if isinstance(self.expert, int) else stack
        rows, *rest = matrix[::-1] if self.transposed else matrix
        return len(range(*self.outputs.indices(rows))), *rest


def unstacked(
    config: Mapping[str, Any], names: Collection[str], read_shapes: Callable[[list[str]], Mapping[str, Shape]]
) -> dict[str, Slice]:
    """The tensors of single experts by name, and where they are. Empty if the family does not stack them.

    Args:
        config: the content of the config.json.
        names: of all tensors.
        read_shapes: returns the shapes of some of them.

    Raises `ModelError` if there are too many experts.
    """
    parts = (config.get(key) for key in ("text_config", "transformer_layer_config"))
    raw = next((part for part in parts if isinstance(part, Mapping)), config)
    whole = slice(None)
    if raw.get("model_type") == "kimi_linear":
        named = filter(None, map(KIMI_DENSE.fullmatch, names))
        return {f"{m[1]}mlp.{m[2]}": Slice(m[0], ..., whole, transposed=False) for m in named}
    if raw.get("model_type") == "gpt2":
        named = filter(None, map(CONVOLUTION.fullmatch, names))
        return {f"{m[1]}linear_{m[2]}": Slice(m[0], ..., whole, m[0].endswith("weight")) for m in named}
    if LOGITS_BIAS in names:
        first = Slice(LOGITS_BIAS, 0, slice(None), transposed=False)
        return dict.fromkeys(("model.shared.bias", "lm_head.bias"), first)
    stacking = STACKINGS.get(str(raw.get("model_type")))
    found: dict[str, Slice] = {}
    stacks = [name for name in names if SWITCH.fullmatch(name) or (stacking and _parts(name))]
    for name, shape in read_shapes(stacks).items():
        if len(shape) < 2 or len(found) + 2 * shape[0] > MAX_TENSORS:
            raise ModelError(
                f"{name} {list(shape)} should be a stack of experts, and all of them have at most "
                f"{MAX_TENSORS:,} tensors; the file is damaged"
            )
        if (switch := SWITCH.fullmatch(name)) is not None:
            place, part = switch.groups()
            found |= {
                f"{place}.experts.{e}.{part}": Slice(name, e, slice(None), False) for e in range(shape[0])
            }
        elif stacking is not None:
            found |= _slices(stacking, name, shape, raw.get("hidden_size"))
    return found


def _slices(stacking: Stacking, stack: str, shape: Shape, hidden: object) -> Iterator[tuple[str, Slice]]:
    """The tensors of one stack. `hidden` is the hidden size that the file states."""
    found = _parts(stack)
    assert found is not None
    place, part, kind = found
    transposed = kind is None and stacking.transposed is True
    if kind is None and stacking.transposed is None:  # gate and up read the stream, down writes to it
        rows, columns = (shape[1], shape[-1]) if part == "gate_up" else (shape[-1], shape[1])
        transposed = rows == hidden != columns
    parts = {"down_proj": slice(None)}
    if part == "gate_up":
        size = shape[-1 if transposed else 1] // 2
        halves = slice(0, size), slice(size, None)
        turns = slice(0, None, 2), slice(1, None, 2)
        gate, up = turns if stacking.interleaved else halves
        parts = {"gate_proj": gate, "up_proj": up}
    for expert in range(shape[0]):
        for name, outputs in parts.items():
            yield f"{place}.{expert}.{name}.{kind or 'weight'}", Slice(stack, expert, outputs, transposed)


def _parts(name: str) -> tuple[str, str, str | None] | None:
    """The place of a stack, "gate_up" or "down", and what it has beside weights; None: it is no stack."""
    if (found := STACK.fullmatch(name)) is not None:
        return found[1], found[2], found[3]
    if (found := GRANITE_STACK.fullmatch(name)) is not None:
        return f"{found[1]}.experts", "gate_up" if found[2] == "input" else "down", None
    return None
