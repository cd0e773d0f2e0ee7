"""Every set of native kernels that runs on this processor."""

from __future__ import annotations

import pytest

from soothsay.native import VARIANTS, NativeKernels, native_kernels


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    library = native_kernels(request.param)
    if library is None:
        pytest.skip(f"no {request.param} kernels: not compiled, or not for this processor")
    return library
