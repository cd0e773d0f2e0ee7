"""The weights of norms, and numbers that multiply rows."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soothsay.model.loaded_part import FloatPart, LoadedPart, StoredWeights
from soothsay.model.specs.model_spec import NormSpec


class RMSNorm(LoadedPart):
    """A root mean square norm's weights (Zhang and Sennrich 2019, arXiv 1910.07467). `Kernels` apply it.

    If it is `centred`, it is a layer norm (Ba et al. 2016, arXiv 1607.06450), which may have a bias.
    In checkpoints its weights have the name `stored_as`, and are divided by `factor`.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        centred: bool = False,
        biased: bool = False,
        stored_as: str = "weight",
        factor: float = 1.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if biased else None
        self.eps, self.centred = eps, centred
        self.stored_as, self.factor = stored_as, factor

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`."""
        scale = weights.tensor(name, self.stored_as, self.weight).float() * self.factor
        self.weight = nn.Parameter(scale + 1 if weights.zero_centred_norms else scale.clone())
        if self.bias is not None:
            self.bias = nn.Parameter(weights.tensor(name, "bias", self.bias).float().clone())
        return self


class UnitNorm(nn.Module):
    """A norm without weights, which are ones."""

    bias = None

    def __init__(self, size: int, eps: float, *, centred: bool = False):
        super().__init__()
        self.register_buffer("weight", torch.ones(size, device="cpu"), persistent=False)
        self.weight: Tensor
        self.eps, self.centred = eps, centred


def build_norm(spec: NormSpec, size: int) -> RMSNorm | UnitNorm:
    """The norm of rows of `size` numbers."""
    if not spec.learned:
        return UnitNorm(size, spec.eps, centred=spec.centred)
    return RMSNorm(size, spec.eps, centred=spec.centred, biased=spec.biased)


class Multipliers(nn.Module):
    """Numbers of the configuration that multiply rows: one for each part of a row, of these sizes."""

    def __init__(self, factors: Sequence[float], sizes: Sequence[int]):
        super().__init__()
        row = torch.tensor(factors, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
        self.register_buffer("row", row, persistent=False)
        self.row: Tensor


class Vector(FloatPart):
    """A learned vector or small matrix, which stays plain. It has the `name` that it has in checkpoints."""

    def __init__(self, name: str, *shape: int):
        super().__init__(**{name: name})
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    @property
    def value(self) -> Tensor:
        """The parameter, in the shape that it was made with, float32."""
        return self.get_parameter(self.name)
