"""Observations: the features of the tapped layers belong to the right tokens, whatever shares the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from soothsay import LLM, Drafter, DraftTree, Observation, Request, SamplingParams, Target
from soothsay.core.batch import Batch, Rows
from soothsay.model.transformer import Transformer


class Watcher(Drafter):
    """Drafts a small tree, mostly wrong, and notes the features of every committed token."""

    taps = (1, 2)
    max_nodes = 4

    def __init__(self, target: Target):
        self.target = target
        self.features: dict[Request, dict[int, torch.Tensor]] = {}
        self.chunks = 0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for request, tree in zip(requests, trees, strict=True):
            tree.extend([int(request.tokens[0]), 3])
            tree.extend([5])
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            nodes = 0 if seen.tree is None else len(seen.tree) - 1
            assert all(len(tap) == seen.num_pending + nodes for tap in seen.taps)
            self.chunks += seen.tree is None
            if seen.tree is not None:
                assert seen.logits is not None
                assert seen.verdict is not None
                assert len(seen.logits) == len(seen.tree)
                said = seen.logits[[0, *seen.verdict.path]].argmax(-1).tolist()
                assert said == seen.verdict.tokens  # at temperature 0
            own = self.features.setdefault(seen.request, {})
            for row in range(seen.num_pending):
                own[seen.start + row] = torch.stack([tap[row] for tap in seen.taps])
            for depth, node in enumerate(seen.verdict.path if seen.verdict else ()):
                row = seen.num_pending + node - 1
                own[len(seen.request.tokens) + depth] = torch.stack([tap[row] for tap in seen.taps])


def test_features_are_those_of_the_tokens(tiny: Callable[..., Transformer]) -> None:
    model = tiny(3)
    llm = LLM(model, drafter="none", max_rows=20, prefix_caching=False)
    watcher = Watcher(llm.engine.target)
    prompts = [list(range(1, 40)), [7, 7, 7], list(range(50, 60)), [2]]
    params = SamplingParams(temperature=0, max_tokens=12)
    drafters = [watcher, "prompt-lookup(min_ngram=1)", watcher, watcher]
    results = llm.generate(prompts, params, drafter=drafters)
    expected = llm.generate(prompts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert watcher.chunks > 0
    assert len(watcher.features) == 3
    for request, features in watcher.features.items():
        tokens = request.tokens[: len(features)]
        assert sorted(features) == list(range(len(tokens)))
        with torch.inference_mode():
            _, taps = model(
                Batch.pack([Rows(np.array(tokens), 0)], group=model.spec.group), taps=Watcher.taps
            )
        for position, seen in features.items():
            assert torch.allclose(seen, torch.stack([tap[position] for tap in taps]), atol=1e-3)
