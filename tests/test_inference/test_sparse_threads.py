# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sparse execution in several threads, and of what somebody has kept from before."""

import copy
import sys
import threading

import pytest
import torch
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.inference import enable_sparse, is_sparse

pytestmark = pytest.mark.usefixtures('without_gradients')


def test_threads_do_not_disturb_each_other():
    model = build()
    inputs = [pictures(1, (32, 32)) * (i + 1) for i in range(2)]
    wanted = [model(x) for x in inputs]
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(*wanted, strict=True))
    enable_sparse(model, way='groups')
    wrong = []

    def work(i):
        with torch.no_grad():
            for _ in range(8):
                for out, want in zip(model(inputs[i]), wanted[i], strict=True):
                    if (out - want).abs().max() > 1e-4 * want.abs().max():
                        wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_of_many_threads_prepares_anew():
    """They all find a module replaced, and switch as often as they can."""
    model = build()
    x = pictures(1, (32, 32))
    wanted = model(x)
    plain = copy.deepcopy(model.layer2[0].conv1)
    enable_sparse(model)
    model(x)
    wrong = []
    barrier = threading.Barrier(6)

    def work():
        barrier.wait()
        try:
            with torch.no_grad():
                assert_equal_outputs(model(x), wanted)
        except Exception as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(15):
            model.layer2[0].conv1 = copy.deepcopy(plain)
            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert is_sparse(model)


def test_passes_of_others_do_not_keep_one_from_preparing():
    """Those that record gradients never notice that a layer has changed."""
    model = enable_sparse(build())
    x = pictures(1, (32, 32))
    wanted = model(x)
    conv = model.layer3[0].conv1
    conv.forward = lambda x: type(conv).forward(conv, x)
    stop, done = threading.Event(), threading.Event()

    def train():
        with torch.enable_grad():
            while not stop.is_set():
                model(x)

    def evaluate():
        with torch.no_grad():
            assert_equal_outputs(model(x), wanted)
        done.set()

    others = [threading.Thread(target=train) for _ in range(3)]
    for thread in (*others, threading.Thread(target=evaluate, daemon=True)):
        thread.start()
    ended = done.wait(30)
    stop.set()
    for thread in others:
        thread.join()
    assert ended


def test_a_forward_kept_from_before_runs_what_came_after():
    model = enable_sparse(build())
    x = pictures(1, (32, 32))
    wanted, kept = model(x), model.forward
    plain = copy.deepcopy(build().layer2[0].conv1)
    for _ in range(2):
        model.layer2[0].conv1 = copy.deepcopy(plain)
        assert_equal_outputs(kept(x), wanted)
        assert is_sparse(model)
    # Somebody's own that calls it, and sparse once more around that.
    model.forward = lambda x: kept(x)
    assert_equal_outputs(enable_sparse(model)(x), wanted)
    assert is_sparse(model)
