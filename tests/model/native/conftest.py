"""Every set of native kernels that runs on this processor."""

from __future__ import annotations

import pytest

from soothsay.model.native.library import VARIANTS
from soothsay.model.native.native_kernels import NativeKernels


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    try:
        return NativeKernels(request.param)
    except OSError as error:
        pytest.skip(f"no {request.param} kernels: {error}")
