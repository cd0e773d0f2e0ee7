"""Checks that a head was made for the target that it is loaded for, whole or with a view of its features.

config.json states a view's numbers at `["soothsay"]["view"]`. Its embedding, last norm and output head are
tensors among the head's own. Their names are those of speculators for copies of a target's tensors.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.drafter_files import WEIGHT_DTYPES, DrafterFiles
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.numeric_mode import NumericMode

EMBEDDING = "verifier_embed_tokens.weight"
NORM = "verifier_norm.weight"
HEAD = "verifier_lm_head.weight"
"""Left out where the embedding is the output head, too."""

TARGET_HEAD = "target_head"
"""The key of config.json that says that `lm_head.weight` has the target's rows, and was never trained."""

ENDS = frozenset({EMBEDDING, NORM, HEAD})

LARGEST = 1e30
"""Limit of a view's numbers: what float32 can hold, and its square too nearly."""

NUMBERS = {
    "target_hidden_size": "target_hidden_size",
    "feature_size": "size",
    "feature_scale": "scale",
    "norm_eps": "norm_eps",
    "embedding_scale": "embedding_scale",
}
"""Keys of config.json, and the attributes of `FeatureView` that they state."""


@dataclass(frozen=True, eq=False)
class FeatureView:
    """The part of the target's features that a head reads, and the ends that belong to this part.

    The head reads the first H dimensions of each feature, divided by `scale`. The target's embedding, last
    norm and output head do not fit H dimensions, so the view has its own. V is the target's vocabulary.
    """

    target_hidden_size: int
    """Dimensions of the features of the target that the head was made for."""

    scale: float

    embedding: Tensor
    """`[V, H]` in the dtype that it is stored in."""

    embedding_scale: float
    """Rows of the embedding are multiplied by this number."""

    norm: Tensor
    """`[H]` float32: the weight of the last norm."""

    norm_eps: float

    head: Tensor
    """`[V, H]`: the output head. It may be `embedding` itself."""

    @property
    def size(self) -> int:
        """H."""
        return len(self.norm)

    def cut(self, taps: Sequence[Tensor]) -> list[Tensor]:
        """The part of each feature, `[N, H_target] -> [N, H]` float32."""
        if self.scale == 1.0:
            return [tap[:, : self.size].contiguous() for tap in taps]
        return [tap[:, : self.size] / self.scale for tap in taps]

    def ends(self, target: Transformer) -> TargetEnds:
        """The view's ends, which compute in the dtype of `target`."""
        kernels = kernels_for(replace(target.spec, hidden_size=self.size), target.kernels)
        mode = NumericMode(target.dtype, target.bits)
        norm = RMSNorm(self.size, self.norm_eps)
        norm.weight = nn.Parameter(self.norm)
        head = kernels.linear(mode.convert("head", self.head), None, torch.float32)
        embedding = Embedding(self.embedding, self.embedding_scale)
        ends = TargetEnds(embedding, norm, head, kernels, target.spec.head)
        return ends.to(target.device).requires_grad_(False)


def kernels_for(config: ModelSpec, own: Kernels) -> Kernels:
    """`own`, the target's kernels, if they can compute modules of these sizes; else stock operations."""
    return own if own.fit(config) else StockKernels()


def read_view(files: DrafterFiles, target: ModelSpec) -> FeatureView | None:
    """The view that a checkpoint states, or None if it states none: then the head reads whole features.

    Raises `DrafterError` for a view that is damaged or was made for another target.
    """
    raw = (files.config.get("soothsay") or {}).get("view")
    if raw is None:
        return None
    numbers = _numbers(files, raw)
    made_for, size = int(numbers["target_hidden_size"]), int(numbers["feature_size"])
    if made_for != target.hidden_size:
        raise DrafterError(
            f"{files.path} reads features of {made_for} dimensions; the target's have {target.hidden_size}: "
            "take the drafter that was trained for this target"
        )
    if not 1 <= size <= made_for:
        raise _damaged(files, f"reads {size} of {made_for} dimensions")
    for name in (EMBEDDING, NORM):
        if name not in files.names:
            raise _damaged(files, f"has no tensor {name!r}")
    head = HEAD if HEAD in files.names else EMBEDDING
    vocab = files.rows(EMBEDDING)
    if vocab != target.vocab_size:
        raise DrafterError(
            f"{files.path} was made for a vocabulary of {vocab:,} tokens; the target's has "
            f"{target.vocab_size:,}: take the drafter that was trained for this target"
        )
    for name, expected in ((EMBEDDING, (vocab, size)), (head, (vocab, size)), (NORM, (size,))):
        if files.shape(name) != expected or files.dtype(name) not in WEIGHT_DTYPES:
            held = f"{files.dtype(name)} {list(files.shape(name))}"
            raise _damaged(files, f"needs {name} to be {list(expected)} of floating point, and it is {held}")
    embedding, norm = files.read(EMBEDDING), files.read(NORM).float()
    output = embedding if head == EMBEDDING else files.read(head)
    scale, embedding_scale = numbers["feature_scale"], numbers["embedding_scale"]
    return FeatureView(made_for, scale, embedding, embedding_scale, norm, numbers["norm_eps"], output)


def view_config(view: FeatureView) -> dict[str, Any]:
    """What config.json says of a view, to be put at `["soothsay"]["view"]`."""
    return {key: getattr(view, attribute) for key, attribute in NUMBERS.items()}


def view_tensors(view: FeatureView) -> dict[str, Tensor]:
    """The tensors of a view's ends, in the dtypes that they have."""
    tensors = {EMBEDDING: view.embedding, NORM: view.norm}
    return tensors if view.head is view.embedding else {**tensors, HEAD: view.head}


def _numbers(files: DrafterFiles, raw: object) -> dict[str, float]:
    """The view's numbers by their keys. Raises `DrafterError` unless all are there and above 0."""
    if not isinstance(raw, Mapping) or raw.keys() != NUMBERS.keys():
        raise _damaged(files, f"should have {', '.join(NUMBERS)}")
    for key, value in raw.items():
        if not isinstance(value, int | float) or not 0 < value < LARGEST:
            raise _damaged(files, f"has {key}={value!r}, which should be a number above 0")
    return dict(raw)


def _damaged(files: DrafterFiles, why: str) -> DrafterError:
    return DrafterError(
        f"{files.path}: its view of the target's features {why}; it is damaged, or of another version"
    )


PADDING = 1024
"""Two vocabularies are the same, with other padding, if their sizes differ by fewer rows than this. (Qwen has
151,936 and 152,064.)"""


class TargetFit:
    """The target that a head is checked against, as the head sees it: through its view, if it has one.

    Raises `DrafterError` if the view does not fit the target.
    """

    def __init__(self, target: Target, files: DrafterFiles):
        model = target.model
        self.config, self.embedding, self.kernels = model.spec, model.embedding, model.kernels
        self.context = target.config.max_context or model.spec.max_positions  # of the longest request
        self.files = files
        self.view = read_view(files, model.spec)  # None: the head reads whole features

    @property
    def hidden_size(self) -> int:
        """Dimensions of the features that the head reads."""
        return self.config.hidden_size if self.view is None else self.view.size

    def kernels_for(self, block: ModelSpec) -> Kernels:
        """The target's kernels if they can compute this block, else stock operations."""
        return kernels_for(block, self.kernels)

    def has_embedding(self, table: Tensor) -> bool:
        """Whether `table` is a copy of the embedding that the head shares, so that it can be left out."""
        if self.view is not None:
            own, scale = self.view.embedding, self.view.embedding_scale
        else:
            own, scale = self.embedding.weight, self.embedding.scale
        same = scale == 1.0 and own.shape == table.shape and not own.is_meta
        return same and torch.equal(own.cpu(), table.to(own.dtype))

    def check(self, *, hidden: int, vocab: int) -> None:
        """Raises `DrafterError` unless the hidden size is that of the features, and the vocabulary is the
        target's. Padding of the vocabulary may differ.
        """
        if hidden != self.hidden_size:
            own = "the target's is" if self.view is None else "its view of the target's has"
            self.refuse(f"was made for a model of hidden size {hidden}; {own} {self.hidden_size}")
        if abs(vocab - self.config.vocab_size) >= PADDING:
            self.refuse(
                f"was made for a vocabulary of {vocab:,} tokens; the target's has {self.config.vocab_size:,}"
            )

    def check_layers(self, layers: int) -> None:
        """Raises `DrafterError` for a target with another number of layers."""
        if layers != self.config.num_layers:
            self.refuse(f"was made for a model of {layers} layers; the target has {self.config.num_layers}")

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises `DrafterError` for layers that the target does not have."""
        if not taps or min(taps) < 0 or max(taps) > self.config.num_layers:
            self.refuse(f"reads layers {list(taps)}; the target has {self.config.num_layers}")

    def check_context(self, positions: int) -> None:
        """Warns if requests may be longer than the contexts that the head was made for."""
        if positions < self.context:
            warnings.warn(
                f"{self.files.path} was made for contexts of {positions:,} tokens, requests may have "
                f"{self.context:,}: beyond the former its guesses may be poor (never the answers)",
                stacklevel=2,
            )

    def refuse(self, why: str) -> None:
        """Raises `DrafterError`: the head is another model's."""
        raise DrafterError(f"{self.files.path} {why}: take the drafter that was trained for this target")


MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys that state which token is the mask."""


def mask_token(files: DrafterFiles, options: Mapping[str, Any]) -> int:
    """The token of the rows whose tokens are guessed. Raises `DrafterError` if `options` state none."""
    for key in MASKS:
        if key in options:
            return int(options[key])
    raise DrafterError(
        f"{files.path / 'config.json'} does not say which token is the mask ({', '.join(MASKS)})"
    )


def draft_vocabulary(files: DrafterFiles, block: ModelSpec, fit: TargetFit) -> tuple[dict[str, Tensor], int]:
    """Read which of the target's tokens the output head in the files is for, if it is there.

    Returns:
        Values of the parameters `d2t` and `head.weight` that are not in the files as we need them, and the
        number of tokens.

    Raises:
        DrafterError: it does not fit, or neither it nor a list of tokens is there.
    """
    own, target = "lm_head.weight" in files.names, fit.config.vocab_size
    if not own and not (files.config.get(TARGET_HEAD) and "d2t" in files.names):
        raise DrafterError(f"{files.path} has no lm_head.weight, its output head: it is incomplete")
    draft = files.rows("lm_head.weight" if own else "d2t")
    if "d2t" in files.names:
        offsets = files.read("d2t")
        if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in (torch.int64, torch.int32):
            raise DrafterError(
                f"{files.path}: d2t is {offsets.dtype} {list(offsets.shape)} and should be a list of "
                "integers; it is damaged"
            )
        ids = offsets + torch.arange(len(offsets))
        if len(ids) != draft or int(ids.min()) < 0 or int(ids.max()) >= target:
            raise DrafterError(
                f"{files.path}: d2t maps {len(ids):,} tokens to ids up to {int(ids.max()):,}; the output "
                f"head has {draft:,} rows and the target {target:,} tokens: take the drafter of this target"
            )
        return {}, draft
    if draft != block.vocab_size:
        raise DrafterError(
            f"{files.path} has an output head of {draft:,} tokens of {block.vocab_size:,}, and no d2t that "
            "says which: the download is incomplete"
        )
    kept = min(draft, target)  # rows beyond are padding
    given = {"d2t": torch.zeros(kept, dtype=torch.int64)}
    if kept < draft:
        given["head.weight"] = files.read("lm_head.weight")[:kept]
    return given, kept
