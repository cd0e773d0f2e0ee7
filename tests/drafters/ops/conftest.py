"""Drafters' operations in every native form that runs on this processor."""

from __future__ import annotations

import pytest

from soothsay.drafters.ops.native_draft_ops import NativeDraftOps
from soothsay.model.native.library import VARIANTS


@pytest.fixture(params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> NativeDraftOps:
    try:
        return NativeDraftOps(request.param)
    except OSError as error:
        pytest.skip(f"no {request.param} kernels: {error}")
