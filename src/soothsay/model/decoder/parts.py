"""Builds the parts of layers from their specs: the one place that knows which module a spec stands for."""

from collections.abc import Callable, Mapping

from torch import nn

from soothsay.model.decoder.attention_layer import (
    Attention,
    AttentionBesideStates,
    LatentAttention,
    RecurrentLayer,
)
from soothsay.model.decoder.feed_forward import DenseAndExperts, Experts, dense
from soothsay.model.decoder.recurrent_layers import (
    ConvolutionLayer,
    DeltaLayer,
    KimiDeltaLayer,
    SelectiveLayer,
    StateSpaceLayer,
)
from soothsay.model.ops.kernels import Kernels
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import DenseAndExpertsSpec, DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import MixerSpec, MLPSpec, NormSpec
from soothsay.model.specs.state_specs import (
    BesideStatesSpec,
    ConvolutionSpec,
    DeltaSpec,
    KimiDeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)

Mixer = Attention | LatentAttention | RecurrentLayer

MIXERS: Mapping[type, Callable[..., Mixer]] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    DeltaSpec: DeltaLayer,
    KimiDeltaSpec: KimiDeltaLayer,
    ConvolutionSpec: ConvolutionLayer,
    StateSpaceSpec: StateSpaceLayer,
    SelectiveSpec: SelectiveLayer,
    BesideStatesSpec: AttentionBesideStates,
}
"""The modules of specs."""


def build_mixer(spec: MixerSpec, hidden: int, kernels: Kernels, in_features: int | None = None) -> Mixer:
    """The part of a layer in which tokens read what came before them.

    It adds to a stream of `hidden` numbers. `in_features` is the size of its input rows; None: `hidden`.
    """
    return MIXERS[type(spec)](spec, hidden, kernels, in_features)


def build_mlp(spec: MLPSpec, hidden: int, norm: NormSpec, kernels: Kernels) -> nn.Module:
    """The feed-forward part of a layer. `norm` is for parts that norm their own inputs."""
    match spec:
        case DenseSpec():
            return dense(spec, hidden, kernels)
        case ExpertsSpec():
            return Experts(spec, hidden, kernels)
        case DenseAndExpertsSpec():
            return DenseAndExperts(spec, hidden, norm, kernels)
