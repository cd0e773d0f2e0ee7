"""soothsay: speculative decoding that never changes a word.

Example:
    >>> from soothsay import LLM, SamplingParams
    >>> llm = LLM("pilot", drafter="prompt-lookup")
    >>> result = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0))
"""

from soothsay.drafters import REGISTRY, Drafter, Observation, Target
from soothsay.engine.request import FinishReason, Piece, Request, SpeculationStats, TokenLogprobs
from soothsay.engine.sampling import SamplingParams
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError, ModelError, RequestError, SoothsayError
from soothsay.llm import LLM, Choice, Result, Stream
from soothsay.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "REGISTRY",
    "Choice",
    "DraftTree",
    "Drafter",
    "DrafterError",
    "FinishReason",
    "ModelError",
    "Observation",
    "Piece",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "SoothsayError",
    "SpeculationStats",
    "Stream",
    "Target",
    "TokenLogprobs",
    "Tokenizer",
]
