"""Searches for the layers that a model can leave out to draft for itself.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) searches for a layer set too. Here the set grows by the
layer whose loss changes the fewest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.drafters.models.layer_skipping import SkipSet
from soothsay.errors import DrafterError
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec, Part
from soothsay.model.transformer import Transformer


def search(
    model: Transformer, samples: Tensor, progress: Callable[[int, int, int], None] = lambda *_: None
) -> list[SkipSet]:
    """Find layer sets of one layer, two layers, and so on. Each adds the layer that changes fewest tokens.

    Agreement is measured as it matters in drafting: at each token, all tokens before it have the whole
    model's KV. A layer that changes tokens in a smaller set is assumed to change at least as many in a larger
    one. So most layers need not be tried again (lazy greedy, Minoux 1978). The search ends where no larger
    set can be faster.

    Args:
        model: the target.
        samples: `[n, tokens]` int64, text like the text that the model will generate.
        progress: called with the number of layers left out so far, the number of layers of the model, and
            the number of tokens compared.
    """
    judge, c, found, skip = SkipEvaluator(model, samples), model.spec, list[SkipSet](), list[int]()
    agreement = dict.fromkeys(range(c.num_layers), 1.0)  # with this layer left out too, when last measured
    while agreement:
        progress(len(skip), c.num_layers, judge.judged)
        tried: set[int] = set()
        while True:
            layer = max(agreement, key=lambda layer: (agreement[layer], layer in tried))
            if layer in tried:
                break
            agreement[layer] = judge.agreement({*skip, layer})
            tried.add(layer)
        skip.append(layer)
        found.append(SkipSet(tuple(sorted(skip)), agreement.pop(layer), _cost(c, skip)))
        least = SkipSet((), found[-1].agreement, _cost(c, range(c.num_layers)))
        if least.speedup <= max(one.speedup for one in found):
            break
    return found


class SkipEvaluator:
    """Measures how often a model with layers left out predicts the same token as the whole model.

    Args:
        model: the model.
        samples: `[n, tokens]` int64. Every token is a row; the rows of a sample share the whole model's KV.

    Raises:
        DrafterError: the model keeps states.
    """

    def __init__(self, model: Transformer, samples: Tensor):
        if model.spec.states:
            raise DrafterError(
                f"layers to skip cannot be searched for in family {model.spec.family!r}: its states cannot "
                "be shared between tries; name them, as in layer-skip(skip='4,5')"
            )
        count, size = samples.shape
        self._model, self.judged = model, 0  # judged: tokens that were compared
        self._cache = model.new_cache(count * size + size, 1)
        own = count * size + np.arange(size)  # slots for the KV of the rows with layers left out
        self._tries, self._expected = list[Batch](), list[Tensor]()
        for first, tokens in zip(range(0, count * size, size), samples.numpy(), strict=True):
            slots = first + np.arange(size)
            whole = model.pack([Rows(tokens, 0, slots)])
            self._expected.append(self._run(whole, None))
            rows = [Rows(tokens[t : t + 1], t, np.append(slots[:t], own[t])) for t in range(size)]
            self._tries.append(model.pack(rows))

    def agreement(self, skip: set[int]) -> float:
        """Return the share of tokens that stay the same without the layers `skip`, in 0 to 1."""
        self.judged += sum(len(tokens) for tokens in self._expected)
        layers = [layer for layer in range(self._model.spec.num_layers) if layer not in skip]
        same = [
            (self._run(batch, layers) == tokens).float().mean().item()
            for batch, tokens in zip(self._tries, self._expected, strict=True)
        ]
        return sum(same) / len(same)

    @torch.inference_mode()
    def _run(self, batch: Batch, layers: Sequence[int] | None) -> Tensor:
        """Return `[N]`, the likeliest token after each row."""
        return self._model.logits(self._model(batch, self._cache, layers=layers)[0]).argmax(-1)


def _read_by_a_row(part: Part, hidden: int) -> int:
    """Return the weights of a part that a row reads."""
    if not isinstance(part, ExpertsSpec):
        return part.num_parameters(hidden)
    shared = 0 if part.shared is None else part.shared.num_parameters(hidden)
    return part.routing.chosen * part.expert.num_parameters(hidden) + shared


def _cost(c: ModelSpec, skip: Sequence[int]) -> float:
    """Return the weights that a row reads without the layers `skip`, as a share of all that it reads."""
    layers = [sum(_read_by_a_row(part, c.hidden_size) for part in layer.parts) for layer in c.layers]
    head = c.hidden_size * c.vocab_size
    return (head + sum(layers) - sum(layers[layer] for layer in skip)) / (head + sum(layers))
