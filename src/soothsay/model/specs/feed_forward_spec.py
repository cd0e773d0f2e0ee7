"""Specs of feed-forward parts: dense, mixtures of experts, or both."""

from dataclasses import dataclass

SQUARED_RELU = "relu2"
"""The activation of Nemotron and Arcee."""

UNGATED = SQUARED_RELU, "relu", "plain_gelu_tanh", "plain_gelu", "plain_silu"
"""Activations of parts without a gate. `soothsay.core.functions.UNGATED` has the functions."""

XIELU = "xielu"
"""The activation of Apertus, without a gate. Its numbers are learned; see `soothsay.core.functions.xielu`."""

GATED_SQUARED_RELU = "gated_relu2"
"""The activation of BitNet, with a gate."""

CLIPPED = "clipped_swiglu"
"""The activation of gpt-oss; see `soothsay.model.ops.kernels.clipped_swiglu`."""


@dataclass(frozen=True)
class DenseSpec:
    """Two products with an activation between them. The first has a gate, but with `UNGATED` and `XIELU`."""

    size: int  # between the products
    activation: str = "silu"
    bias: bool = False
    multipliers: tuple[float, float] | None = None  # Falcon-H1: of gates, and of the part's outputs
    sparsity: float = 0.0  # Gemma 3n: the share of gates that become zero
    inner_eps: float | None = None  # BitNet: of a norm before the second product; None: there is none

    @property
    def gated(self) -> bool:
        """Whether the first product has a gate."""
        return self.activation not in (*UNGATED, XIELU)

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        return (2 + self.gated) * hidden * self.size


@dataclass(frozen=True)
class RoutingSpec:
    """How the rows of a pass choose their experts, and with which weights."""

    count: int  # of experts
    chosen: int  # experts of each row
    normalize: bool = True  # the weights of the chosen experts add up to 1
    sigmoid: bool = False  # an expert's weight is the sigmoid of its score, not its softmax among all
    groups: int = 1  # experts are chosen from the best groups of consecutive experts
    groups_chosen: int = 1
    group_best: int = 2  # experts whose scores are summed to rank a group
    scale: float = 1.0  # factor of all weights
    scales_inputs: bool = False  # Llama 4: experts read a row times its weight
    # PhiMoE (SparseMixer, arXiv 2409.12136): an expert's weight is its softmax among the experts that are
    # left and whose scores are lower by no more than this share; None: among all
    within: float | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts."""

    routing: RoutingSpec
    expert: DenseSpec
    shared: DenseSpec | None = None  # the part that all rows run through beside their experts
    shared_gate: bool = False  # the shared part is multiplied by the sigmoid of a score of its own
    router_bias: bool = False
    # tensor of learned numbers that are added to the experts' weights for the choice alone; None: there are
    # none (DeepSeek-V3, arXiv 2412.19437)
    correction: str | None = None
    scaled: bool = False  # the outputs of each expert are multiplied by a learned number
    latent_size: int | None = None  # Nemotron 3 Super: experts read and write states of this size

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        count, shared = self.routing.count, self.shared
        total = count * (self.expert.num_parameters(self.latent_size or hidden) + hidden)
        total += self.shared_gate * hidden + (0 if shared is None else shared.num_parameters(hidden))
        return total + 2 * hidden * (self.latent_size or 0)


@dataclass(frozen=True)
class DenseAndExpertsSpec:
    """A dense part beside a mixture of experts, each with two norms of its own (Gemma 4)."""

    dense: DenseSpec
    experts: ExpertsSpec
