"""Reads adapters (LoRA) as PEFT writes them: adapter_config.json, and matrices in safetensors or pickles."""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.errors import ModelError, type_of
from soothsay.files import check_place, check_size, read_json_object, user_path
from soothsay.model.kernel_sets import usable_device
from soothsay.model.ops.lora import Adapter
from soothsay.model.transformer import Transformer, linear_shapes
from soothsay.model.weights.checkpoint import ADAPTER, Checkpoint, open_weights
from soothsay.model.weights.hub import fetch
from soothsay.model.weights.tensor_names import TensorNames

MATRICES = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of files with matrices. The first that is there is read."""

MAX_BYTES, MAX_RANK = 2**34, 1024
"""Limits of the size of such a file, and of a rank. Published adapters have ranks up to 256."""

RANKS = 16
"""Ranks are padded with zeros to a multiple of this number, which all kernels multiply by."""

UNREAD = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "monteclora_config", "velora_config"),
)
"""Settings of PEFT that make something else than two matrices for each layer of the model as it is."""

PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""

ADAPTABLE = re.compile(r"blocks\.\d+\.(attention\.(qkv|q|q_a|q_b|kv_a|o)|mlp\.(dense\.)?(gate_up|up|down))")
"""Linear layers that may have adapters, by our names. Those of experts may not."""

LEADS = ("model.", "model.language_model.", "language_model.model.", "transformer.")
"""What names may begin with in PEFT's files, beside what they begin with in the model's checkpoint."""

CONVOLUTION = re.compile(r"\.linear_(attn|proj|fc)$")
"""Ends of GPT-2's names, as the loader sees them (`soothsay.model.formats.stacked_experts`)."""

MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
PATTERN = re.compile(r"\^?[\w.]+")
"""Names of modules in `alpha_pattern`. PEFT takes regular expressions, which can take for ever."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Place(NamedTuple):
    """The rows of one of our linear layers that a layer of the checkpoint has."""

    module: str
    part: int


class AdapterFiles:
    """An adapter that has not been loaded. Its configuration is checked, so that loading is worth it.

    Args:
        source: a directory, or `owner/name` on the hub.

    Raises `ModelError` if there is no adapter, or one that does not run here.
    """

    def __init__(self, source: str | os.PathLike[str]):
        self.path = user_path(source)
        check_place(self.path)
        if not self.path.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
            self.path = fetch(str(source), [ADAPTER, *MATRICES])
        if not (self.path / ADAPTER).is_file():
            raise ModelError(
                f"no adapter at {str(source)!r}: give a directory with {ADAPTER}, or a name 'owner/name' on "
                "the hub"
            )
        self._config = config = read_json_object(self.path / ADAPTER)
        kind = config.get("peft_type")
        if kind != "LORA":
            raise self._error(f"is of type {kind!r:.40}; only LoRA is supported")
        used = [name for name in UNREAD if config.get(name)]
        if config.get("bias", "none") != "none":
            used.append("bias")
        if used:
            raise self._error(
                f"uses {', '.join(used)}, which is not supported; merge it into the model (peft: "
                "merge_and_unload)"
            )
        if (beginning := config.get("init_lora_weights", True)) not in PLAIN_BEGINNINGS:
            raise self._error(
                f"was trained with init_lora_weights={beginning!r:.40}, which changes the model's own "
                "weights; convert it to plain LoRA (peft: save_pretrained with "
                "path_initial_model_for_weight_conversion)"
            )
        self._alpha, self._alphas = (
            self._alpha_of("lora_alpha", config.get("lora_alpha", 8)),
            self._patterns(),
        )

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"adapter {self.path} {problem}")

    def _alpha_of(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
            raise self._error(f"has {name}={value!r:.40} in {ADAPTER}; it must be a number")
        return value

    def _patterns(self) -> dict[str, float]:
        given = self._config.get("alpha_pattern") or {}
        if not isinstance(given, Mapping) or not all(map(PATTERN.fullmatch, given)):
            raise self._error(f"has an alpha_pattern in {ADAPTER} that does not map names of modules")
        return {name: self._alpha_of("alpha_pattern", value) for name, value in given.items()}

    def _scale(self, name: str, rank: int) -> float:
        """What the product of the matrices of a module is multiplied by."""
        own = (
            alpha
            for pattern, alpha in self._alphas.items()
            if pattern.lstrip("^") == name or (pattern[0] != "^" and name.endswith(f".{pattern}"))
        )
        return next(own, self._alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def load(self, model: Transformer, checkpoint: Checkpoint) -> Adapter:
        """Load it for a model, which was loaded from `checkpoint`.

        Raises `ModelError` if it adapts what the model does not have, or what no adapter may change here.
        """
        if model.spec.source is not None:
            raise ModelError("encoder-decoders cannot have adapters; merge one into the model's files")
        names = TensorNames(model.spec, checkpoint)
        layers = {
            name: shape for name, shape in linear_shapes(model.spec).items() if ADAPTABLE.fullmatch(name)
        }
        places = {
            CONVOLUTION.sub(r".c_\1", stored.removeprefix(names.prefix)): _Place(name, part)
            for name in layers
            for part, stored in enumerate(names.of(name))
        }
        file = next((self.path / name for name in MATRICES if (self.path / name).is_file()), None)
        if file is None:
            raise self._error(f"has no {' and no '.join(MATRICES)}")
        check_size(file, MAX_BYTES)
        parts, pairs = {}, dict[str, dict[int, tuple[Tensor, Tensor]]]()
        with open_weights(file) as opened:
            for name, place in self._named(opened.keys(), places, names.prefix).items():
                down, up = (
                    opened.get_tensor(f"base_model.model.{name}.lora_{which}.weight") for which in "AB"
                )
                self._check(name, down, up)
                scaled = up.float() * self._scale(name, len(down))
                pairs.setdefault(place.module, {})[place.part] = down.float(), scaled
            for module, own in pairs.items():
                parts[model.get_submodule(module)] = self._low_rank(model, names, module, layers[module], own)
        digest = hashlib.sha256((self.path / ADAPTER).read_bytes())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
        return Adapter(digest.hexdigest(), parts)

    def _named(self, keys: list[str], places: Mapping[str, _Place], prefix: str) -> dict[str, _Place]:
        """The place of each module that the file has both matrices of. Raises `ModelError` for others."""
        found = dict[str, _Place]()
        for key in keys:
            matrix = MATRIX.fullmatch(key)
            own = None if matrix is None else matrix[1]
            leads = (prefix, *LEADS, "")
            place = own and next(
                (places[short] for lead in leads if (short := own.removeprefix(lead)) in places), None
            )
            if own is None or not place:
                raise self._error(
                    f"has {key!r:.200}, which is no LoRA matrix of attention or of a dense feed-forward part "
                    "of this model; was it made for another one? Experts, embeddings, norms and the output "
                    "head cannot be adapted here"
                )
            if place in found.values() and found.get(own) != place:
                raise self._error(f"has {key!r:.200} under two names")
            found[own] = place
        for name in found:
            for which in "AB":
                if f"base_model.model.{name}.lora_{which}.weight" not in keys:
                    raise self._error(f"has no lora_{which} of {name:.200}; download it again")
        if not found:
            raise self._error("has no matrices")
        return found

    def _check(self, name: str, down: Tensor, up: Tensor) -> None:
        """Raise `ModelError` for matrices that no product can have."""
        shapes = f"{name:.200} has matrices {list(down.shape)} and {list(up.shape)}"
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1] or not 0 < len(down) <= MAX_RANK:
            raise self._error(
                f"does not fit: {shapes}; a rank is between 1 and {MAX_RANK}, and the same for both"
            )
        if down.dtype not in FLOATS or up.dtype not in FLOATS:
            raise self._error(f"does not fit: {name:.200} is stored as {down.dtype} and {up.dtype}")
        if not (down.isfinite().all() and up.isfinite().all()):
            raise self._error(f"is damaged: {name:.200} has numbers that are not finite")

    def _low_rank(
        self,
        model: Transformer,
        names: TensorNames,
        module: str,
        shape: torch.Size,
        own: Mapping[int, tuple[Tensor, Tensor]],
    ) -> nn.Module:
        """The matrices of the parts of one of our linear layers, in one pair.

        Those of queries, keys and values, for example, stand below each other in the first matrix, and in
        the second one in blocks: q's rank meets the rows of q alone.
        """
        stored, (out, size) = names.of(module), shape
        downs, ups = list[Tensor](), list[Tensor]()
        for part, rows in enumerate(names.rows(module, out)):
            down, up = own.get(part, (torch.empty(0, size), torch.empty(rows, 0)))
            if down.shape[1] != size or len(up) != rows:
                raise self._error(
                    f"does not fit: {stored[part]} of this model has {size} inputs and {rows} outputs, and "
                    f"the adapter {down.shape[1]} and {len(up)}; was it made for another model?"
                )
            downs.append(down)
            ups.append(up)
        order, pad = names.row_order(module), -sum(map(len, downs)) % RANKS
        whole: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        whole = whole if order is None else whole[order]
        padded = F.pad(torch.cat(downs), (0, 0, 0, pad)), F.pad(whole, (0, pad))
        return model.kernels.low_rank(*(one.to(model.dtype) for one in padded)).requires_grad_(False)


def opened_adapters(
    adapters: Mapping[str, str | os.PathLike[str]],
    model: str | os.PathLike[str] | Transformer,
    device: str = "cpu",
    stages: object = 1,
) -> dict[str, AdapterFiles]:
    """Open the adapters of a model that is yet to be loaded. For the arguments see `soothsay.LLM`.

    Raises:
        ModelError: one cannot be used, or the model cannot have any.
        TypeError: `adapters` is no mapping.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(f"adapters must be a dict of names and directories, not {type_of(adapters)}")
    if not adapters:
        return {}
    if isinstance(model, Transformer):
        raise ModelError("adapters are loaded with a model's files: give the model by its path or name")
    if stages != 1:
        raise ModelError("a model in several stages cannot have adapters; merge one into the model's files")
    if (place := usable_device(device)).type != "cpu":
        raise ModelError(f"adapters run on CPUs only, not on {place}; merge one into the model's files")
    for name in adapters:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,200}", name):
            raise ModelError(
                f"{name!r:.200} cannot be an adapter's name: letters, digits and . _ - / : make names"
            )
    return {name: AdapterFiles(path) for name, path in adapters.items()}
