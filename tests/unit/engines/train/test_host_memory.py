"""A micro-batch reuses the memory of the previous one without new pages from the system."""

import platform
import resource

import pytest
import torch

from interlace.engines.train.packed_model import keep_freed_memory

MIB = 1 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_is_used_again() -> None:
    keep_freed_memory()
    before, touched = 0, 0
    for repeat in range(4):
        if repeat == 1:
            before, touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 0
        tensors = [torch.ones(2 * MIB) for _ in range(12)]
        touched += sum(tensor.nbytes for tensor in tensors)
        del tensors
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages * resource.getpagesize() < touched / 4
