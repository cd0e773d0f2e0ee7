"""AWQ checkpoints, as AutoAWQ writes them for its GEMM kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from soothsay.model.formats.weight_format import Reader, Settings, checked, kind, unpack
from soothsay.model.quantized import Quantized


@dataclass(frozen=True, slots=True)
class AWQ:
    """The format of AutoAWQ for its GEMM kernels.

    `qweight` `[in, out / 8]` int32 and `qzeros` `[groups, out / 8]` are packed along `out`, with columns
    0 2 4 6 1 3 5 7 in a word. `scales` is `[groups, out]`.
    """

    path: Path
    group_size: int | None
    bits: int = 4

    @classmethod
    def of(cls, settings: Settings) -> AWQ:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        short = "w_bit" in settings.values  # the keys of AutoAWQ's own quant_config.json
        settings.one_of("w_bit" if short else "bits", {4: 4})
        settings.one_of("version", {"gemm": 0, "GEMM": 0}, default="gemm")
        return cls(settings.path, settings.group_size("q_group_size" if short else "group_size"))

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{kind(4, self.group_size)} (AWQ)"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        weight, zeros, scales = (read(name) for name in self.tensors(module))
        values, zeros, scales = self._columns(weight).t(), self._columns(zeros).t(), scales.t()
        return checked(f"{self.path}: {module}", 4, self.group_size, values, scales, zeros)

    @staticmethod
    def _columns(packed: Tensor) -> Tensor:
        """`[n, out / 8]` -> `[n, out]`."""
        return unpack(packed, 4).view(len(packed), -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
