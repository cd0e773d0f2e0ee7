"""The public names, each from its home. `soothsay` loads this when one of them is first used."""

from soothsay.config import EngineConfig
from soothsay.drafters import REGISTRY, Drafter, Observation, Target
from soothsay.engine.answer import FinishReason, Piece, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.engine.grammar import Grammar
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError, ModelError, RequestError, SoothsayError
from soothsay.llm import LLM
from soothsay.result import Choice, Result, Stream
from soothsay.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "REGISTRY",
    "Choice",
    "DraftTree",
    "Drafter",
    "DrafterError",
    "EngineConfig",
    "FinishReason",
    "Grammar",
    "ModelError",
    "Observation",
    "Piece",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "SoothsayError",
    "SpeculationStats",
    "StepTrace",
    "Stream",
    "Target",
    "TokenLogprobs",
    "Tokenizer",
]
