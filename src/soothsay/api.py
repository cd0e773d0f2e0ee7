"""The public names. `soothsay` imports this module when one of them is first used."""

from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason, Piece, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.core.grammar import Grammar
from soothsay.core.params import SamplingParams
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.core.verify import VERIFIERS, Guessing, Promise, Verdict, Verifier
from soothsay.drafters.base import Drafter, Target
from soothsay.drafters.registry import REGISTRY
from soothsay.errors import DrafterError, ModelError, RequestError, SoothsayError, StepError, VerifierError
from soothsay.llm import LLM
from soothsay.result import Choice, Result, Stream
from soothsay.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "REGISTRY",
    "VERIFIERS",
    "Choice",
    "DraftTree",
    "Drafter",
    "DrafterError",
    "EngineConfig",
    "FinishReason",
    "Grammar",
    "Guessing",
    "ModelError",
    "Observation",
    "Piece",
    "Promise",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "SoothsayError",
    "SpeculationStats",
    "StepError",
    "StepTrace",
    "Stream",
    "Target",
    "TokenLogprobs",
    "Tokenizer",
    "Verdict",
    "Verifier",
    "VerifierError",
]
