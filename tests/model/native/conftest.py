"""Every set of native kernels that runs on this processor."""

from __future__ import annotations

import pytest
from kernels import SETS, opened

from soothsay.model.native.native_kernels import NativeKernels


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return opened(NativeKernels, request.param)
