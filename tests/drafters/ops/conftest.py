"""Drafters' operations in every native form that runs on this processor."""

from __future__ import annotations

import pytest
from kernels import SETS, opened

from soothsay.drafters.ops.native_draft_ops import NativeDraftOps


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> NativeDraftOps:
    return opened(NativeDraftOps, request.param)
