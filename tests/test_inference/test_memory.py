# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import multiprocessing
import platform
import subprocess
import sys

import pytest
import torch

from fgc_mm.inference import memory
from fgc_mm.inference.memory import keep_memory, to_contiguous

FAULTS = """
import resource, torch
from fgc_mm.inference import keep_memory
KEEP
def faults():
    torch.ones(8 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(8)))
"""


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('shape', [(1, 5, 7, 3), (3, 64, 8, 9), (2, 1, 4, 4), (0, 3, 4, 4)])
@pytest.mark.parametrize('layout', [torch.channels_last, torch.contiguous_format])
def test_same_values_in_the_usual_layout(shape, dtype, layout):
    maps = torch.rand(shape).to(dtype).contiguous(memory_format=layout)
    before = maps.clone()
    out = to_contiguous(maps)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert torch.equal(out, maps)
    assert torch.equal(maps, before)


@pytest.mark.parametrize('default', [torch.float64, torch.float16])
def test_another_default_type(default):
    maps = torch.rand(2, 5, 7, 3).contiguous(memory_format=torch.channels_last)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        out = to_contiguous(maps)
    finally:
        torch.set_default_dtype(before)
    assert out.dtype == torch.float32 and torch.equal(out, maps)


def in_two_threads():
    for shape in ((1, 8, 5, 7), (2, 5, 6, 3), (1, 1, 4, 4)):
        maps = torch.rand(shape).contiguous(memory_format=torch.channels_last)
        assert torch.equal(to_contiguous(maps), maps)


def test_two_threads_also_after_a_fork(monkeypatch):
    monkeypatch.setattr(memory, '_MANY', 1)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    in_two_threads()
    assert memory._helper is not None
    child = multiprocessing.get_context('fork').Process(target=in_two_threads)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_gradients_pass():
    maps = torch.rand(1, 3, 4, 5, requires_grad=True)
    to_contiguous(maps.to(memory_format=torch.channels_last)).sum().backward()
    assert torch.equal(maps.grad, torch.ones(1, 3, 4, 5))


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='glibc gives memory back')
def test_memory_is_kept():
    """Once there were maps of 32 MB, 8192 pages, further ones need no new pages; the first few
    may, while small pieces take the room between them."""
    counts = [
        int(subprocess.check_output([sys.executable, '-c', FAULTS.replace('KEEP', keep)]))
        for keep in ('', 'assert keep_memory()')
    ]
    assert counts[0] > 4000 > 1000 > counts[1]


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(platform, 'libc_ver', lambda: ('', ''))
    assert keep_memory() is False
