"""Finds tensors of a checkpoint that a model was not given, although they belong to its blocks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection

from soothsay.model.tensor_names import TensorNames

MEANINGLESS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|[kvq]_(scale|zero_point)|"
    r"[a-z]+put_(scale|zero_point|global_scale)|(weight_)?g_idx|qzeros|weight_(zero_point|shape)"
)
"""Ends of names of tensors that repeat the configuration, or serve number formats that are not used here.

Formats of integers store zero points and the order of groups in symmetric and ordered files, too."""

KEYS = re.compile(r"(self_attn\.|attn_)[kv]_(proj|norm)")
"""Tensors of keys and values, which published files also have in layers that read those of other layers."""

MAX_NAMES = 4
"""Limit of names in a warning."""


def warn_of_unused(names: TensorNames, used: Collection[str], layers: range) -> None:
    """Warn of tensors in the model's blocks that were not read: a bias or a norm that config.json denies.

    Tensors beside the blocks (of images, of drafters, of a head that is shared) are not needed.

    Args:
        names: of the checkpoint's tensors.
        used: the names of those that were read.
        layers: the numbers of the blocks.
    """
    block = re.compile(rf"(?:{re.escape(names.prefix)}layers|blk)\.(\d+)\.")
    left = [
        name
        for name in sorted(names.all.difference(used))
        if (found := block.match(name))
        and int(found[1][:9]) in layers
        and not MEANINGLESS.search(name, found.end())
        and not (names.config.kv_layers[int(found[1])] != int(found[1]) and KEYS.search(name, found.end()))
    ]
    with names.checkpoint.open() as read:  # GPTQ's writers give each of their layers a bias, of zeros
        added = {name for name in left if re.sub(r"\.bias$", ".qweight", name) in names.all - {name}}
        left = [name for name in left if name not in added or read(name).any()]
    if left:
        more = f" and {len(left) - MAX_NAMES:,} more" if len(left) > MAX_NAMES else ""
        warnings.warn(
            f"{names.checkpoint.path} has tensors that {names.config.family} with this config.json does not "
            f"use: {', '.join(left[:MAX_NAMES])}{more}. Answers may be wrong; compare config.json with the "
            "model's origin",
            stacklevel=3,
        )
