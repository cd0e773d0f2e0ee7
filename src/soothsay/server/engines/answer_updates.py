"""What is new of an answer, taken out of its request."""

from __future__ import annotations

from soothsay.core.request import Request
from soothsay.server.engines.engine_messages import AnswerUpdate


def has_news(request: Request) -> bool:
    """Whether an answer has anything that was not reported."""
    return bool(request.pieces) or request.finish_unreported


def is_beginning(request: Request) -> bool:
    """Whether an answer has its first tokens, and none of them has been reported."""
    return 0 < request.num_output == len(request.pieces)


def answer_update(job: int, index: int, request: Request) -> AnswerUpdate:
    """Take the new pieces and traces out of a request."""
    pieces = list(request.pieces)
    request.pieces.clear()
    request.finish_unreported = False
    is_first, scored = request.num_output == len(pieces), request.params.prompt_logprobs is not None
    traces = list(request.traces or ())
    if request.traces:
        request.traces.clear()
    logprobs, end = None, None
    if request.params.logprobs is not None:
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        silent = pieces and pieces[-1].token in request.end_tokens
        if silent and not request.params.include_stop_str_in_output:  # it is not part of the text
            end = logprobs.pop()
    return AnswerUpdate(
        job=job,
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        traces=traces,
        num_output=request.num_output,
        text_length=len(request.answer.text),
        num_cached=request.num_prefix_hits,
        num_preemptions=request.num_preemptions,
        stats=request.stats,
        finish_reason=request.finish_reason,
        token_ids=[piece.token for piece in pieces],
        end_logprobs=end,
        stop=request.answer.stop,
        prompt_logprobs=request.prompt_logprobs if is_first and scored else None,
    )
