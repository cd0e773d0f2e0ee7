"""What API keys may ask for, and what is left of their limits."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from soothsay.server.http.api_errors import ApiError, try_later
from soothsay.server.server_config import network

PRIORITIES = -(2**31), 2**31 - 1
"""The range of priorities."""

Limit = Annotated[int, Field(ge=1, lt=2**53)]
"""A limit of a key: exact as a float too."""


class Key(BaseModel):
    """One API key, without the secret itself: what it may ask for, and how much."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", repr=False)]  # of the secret
    requests_per_minute: Limit | None = None  # None: no limit
    tokens_per_minute: Limit | None = None  # of prompts and answers; None: no limit
    running: Limit | None = None  # answers at once, those that wait included; None: no limit
    # the lowest, which is most urgent
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[1])] = 0
    trace: bool = False  # whether it may ask for `speculation.trace`
    operator: bool = False  # whether it may read the metrics and change the number of engines


class Allowance:
    """A budget that refills at a constant rate, up to one minute's worth.

    A charge may exceed what is left, because the length of an answer is known only at its end. The budget is
    then negative, and nothing can be had until it has refilled.

    Args:
        per_minute: amount that refills in a minute; None: no limit.
        clock: seconds, from any starting point.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic):
        self._rate: float | None = None
        self._most = self._left = 0.0
        self._clock, self._at = clock, clock()
        self.limit(per_minute)

    def limit(self, per_minute: int | None) -> None:
        """Change the limit. What has been charged stays charged."""
        self._refill()
        most = float(per_minute or 0)
        self._left += most - self._most
        self._rate, self._most = None if per_minute is None else per_minute / 60, most

    def wait(self) -> float:
        """Seconds until 1 is available; 0: it is available now."""
        if self._rate is None:
            return 0.0
        self._refill()
        return max((1 - self._left) / self._rate, 0.0) if self._rate else 60.0

    def charge(self, amount: float) -> None:
        """Take an amount. What is left may become negative."""
        if self._rate is not None:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * (self._rate or 0.0), self._most)
        self._at = now


class Account:
    """A key, and what it has left of its limits. Its methods raise `ApiError` if that is not enough."""

    def __init__(self, key: Key):
        self.key = key
        self.requests = Allowance(key.requests_per_minute)
        self.tokens = Allowance(key.tokens_per_minute)
        self.running = 0  # answers that wait or run

    def change(self, key: Key) -> None:
        """Take another key with the same secret."""
        self.key = key
        self.requests.limit(key.requests_per_minute)
        self.tokens.limit(key.tokens_per_minute)

    def charge_request(self, *, with_answers: bool) -> None:
        """Charge for one request, before its body is read. `with_answers`: it asks for at least one."""
        self._check(max(self.requests.wait(), self.tokens.wait()))
        self._check_running(int(with_answers))
        self.requests.charge(1)

    def admit(self, num_answers: int, num_prompt: int) -> Charge:
        """Begin to charge for answers. Other requests may have used up the limit since this one came."""
        self._check(self.tokens.wait())
        self._check_running(num_answers)
        return Charge(self, num_answers, num_prompt)

    def _check_running(self, more: int) -> None:
        if more and self.running + more > (self.key.running or math.inf):
            message = f"this key may have {self.key.running} answers at once; wait until others have ended"
            raise _used_up(message, 1)

    def _check(self, seconds: float) -> None:
        if seconds > 0:
            raise _used_up("this key has used up its limit for this minute; try again later", seconds)


class Charge:
    """What an account is charged for one request. The prompt is charged at once, answers as they grow.

    Args:
        account: None: nothing is charged, since the server has no keys.
        num_answers: that the request asks for.
        num_prompt: tokens of the prompts.
    """

    def __init__(self, account: Account | None, num_answers: int, num_prompt: int):
        self._account, self._num_answers, self._num_prompt = account, num_answers, num_prompt
        self._num_output: dict[int, int] = {}  # tokens by answer
        if account is not None:
            account.running += num_answers
            account.tokens.charge(num_prompt)

    def grow(self, answer: int, num_output: int) -> None:
        """Charge for the new tokens of an answer, which has `num_output` tokens now."""
        if self._account is not None:
            self._account.tokens.charge(num_output - self._num_output.get(answer, 0))
            self._num_output[answer] = num_output

    def end(self, *, refund: bool = False) -> None:
        """End all answers. `refund`: give the prompt back if there is no token of an answer. Idempotent."""
        account, self._account = self._account, None
        if account is None:
            return
        account.running -= self._num_answers
        if refund and not self._num_output:
            account.tokens.charge(-self._num_prompt)


class FailedKeys:
    """Counts requests with wrong keys, by the client's address.

    Args:
        per_minute: limit for one address.
        clock: seconds, from any starting point.
    """

    MAX_ADDRESSES = 10_000  # the address that failed first is forgotten; each takes 0.5 KB

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._per_minute, self._clock = per_minute, clock
        self._left: OrderedDict[str, Allowance] = OrderedDict()

    def count(self, address: str) -> None:
        """Count a failure. Raises `ApiError` if the address has had too many."""
        where = network(address)
        left = self._left.setdefault(where, Allowance(self._per_minute, self._clock))
        self._left.move_to_end(where)
        if len(self._left) > self.MAX_ADDRESSES:
            self._left.popitem(last=False)
        if (seconds := left.wait()) > 0:
            raise _used_up("too many wrong API keys came from this address; try again later", seconds)
        left.charge(1)


def _used_up(message: str, seconds: float) -> ApiError:
    return try_later(message, "rate_limit_exceeded", status=429, seconds=seconds)
