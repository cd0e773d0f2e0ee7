"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from soothsay.model.formats.weight_format import FLAGS, Reader, Settings, checked, kind, require_runs, unpack
from soothsay.model.quantized import Quantized


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The format of AutoGPTQ and GPTQModel.

    `qweight` `[in * bits / 32, out]` int32 is packed along `in`, `qzeros` `[groups, out * bits / 32]` along
    `out`. `scales` is `[groups, out]`, and `g_idx` `[in]` has the group of each input.
    """

    path: Path
    bits: int
    group_size: int | None
    symmetric: bool
    desc_act: bool
    zero_shift: int  # subtracted from zero points before packing

    @classmethod
    def of(cls, settings: Settings) -> GPTQ:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        # GPTQModel's; "-:regex" means modules that are not quantized
        for rule in settings.part("dynamic").values:
            if not rule.startswith("-:"):
                raise settings.refusal(f"gptq with settings of its own for {rule!r} (dynamic)")
        return cls(
            settings.path,
            bits=settings.one_of("bits", {4: 4, 8: 8}),
            group_size=settings.group_size(),
            symmetric=settings.one_of("sym", FLAGS, default=True),
            desc_act=settings.one_of("desc_act", FLAGS, default=False),
            zero_shift=settings.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, default="gptq"),
        )

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{kind(self.bits, self.group_size)} (GPTQ)"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["qweight", "scales"]
        suffixes += [] if self.symmetric else ["qzeros"]
        suffixes += ["g_idx"] if self.desc_act else []
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        held = {name.removeprefix(f"{module}."): read(name) for name in self.tensors(module)}
        zeros = None
        if not self.symmetric:  # added to whole words, which undoes the borrow of a zero point 0
            ones = 0x11111111 if self.bits == 4 else 0x01010101
            zeros = unpack(held["qzeros"] + self.zero_shift * ones, self.bits).t()
        if self.desc_act:
            require_runs(held["g_idx"], self.group_size, f"{self.path}: {module}", "desc_act")
        values, scales = unpack(held["qweight"].t(), self.bits), held["scales"].t()
        return checked(f"{self.path}: {module}", self.bits, self.group_size, values, scales, zeros)
