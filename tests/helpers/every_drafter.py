"""Every drafter of the registry, and variants that are tested beside them.

`OPTIONS` holds the options that a drafter needs in tests.
"""

from __future__ import annotations

from heads import random_dflash, random_peagle, untrained
from stores import tiny_store

from soothsay import REGISTRY

OPTIONS = {
    "rest": "store=STORE",
    "assistant": "model=UNTRAINED",
    "dflash": "model=DFLASH",
    "peagle": "model=PEAGLE",
    "redrafter": "model=UNTRAINED",
}
VARIANTS = [
    "prompt-lookup(min_ngram=1, num_matches=5, num_tokens=4)",  # wrong draft tokens, wide trees
    "draft-model(model=sibyl)",  # the target drafts for itself: its best draft tokens are right
    "draft-model(model=sibyl, dtype=bfloat16, depth=6, width=1, branch=1)",  # nearly always right
    "draft-model(model=sibyl, dtype=float32, depth=3, width=3, branch=3)",  # a grown tree
    "eagle3(model=UNTRAINED)",  # hardly ever right
    "block(model=UNTRAINED)",
    "dflash(model=DSPARK, nodes=15, branch=3)",
    "recycling(tree=measured, branch=4)",
    "layer-skip(exit=3, width=2, branch=3)",
    "suffix > eagle3",
    "suffix + mtp + recycling",
    "prompt-lookup | mtp | draft-model",
]


DRAFTERS = [f"{name}({OPTIONS[name]})" if name in OPTIONS else name for name in REGISTRY] + VARIANTS


def resolve(spec: str) -> str:
    """Fill in the paths of untrained weights and of a datastore."""
    name = spec.partition("(")[0]
    spec = spec.replace("STORE", str(tiny_store())) if "STORE" in spec else spec
    spec = spec.replace("DFLASH", str(random_dflash())) if "DFLASH" in spec else spec
    spec = spec.replace("DSPARK", str(random_dflash(markov=True))) if "DSPARK" in spec else spec
    spec = spec.replace("PEAGLE", str(random_peagle())) if "PEAGLE" in spec else spec
    return spec.replace("UNTRAINED", str(untrained(name))) if "UNTRAINED" in spec else spec
