"""Eager kernels unless a test says otherwise: here the operation is tested, and nothing waits for a compiler."""

import ctypes

import pytest


@pytest.fixture(autouse=True, scope='module')
def _eager_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TWINKLE_MEGATRON_KERNELS', 'eager')
        yield


@pytest.fixture(scope='session')
def memory_given_back():
    """From now on glibc takes every block of 128 KiB and more from the system and gives it back: what is measured is
    what tensors hold, not what malloc keeps of them, which differs from run to run by megabytes. Ranks are forked from
    this process and do the same."""
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD, which moves by itself unless it is set
