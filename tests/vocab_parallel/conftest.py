"""Eager kernels unless a test says otherwise: here the operation is tested, and nothing waits for a compiler."""

import pytest


@pytest.fixture(autouse=True, scope='module')
def _eager_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TWINKLE_MEGATRON_KERNELS', 'eager')
        yield
