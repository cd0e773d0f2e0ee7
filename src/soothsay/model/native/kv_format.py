"""The formats of KV pools, as the library counts them."""

import torch

KV_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2}
"""Element type of a KV pool -> `soothsay_format` of csrc/kernels.h."""
