# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which way a block is run."""

import numpy as np
import pytest

from fgc_mm.inference.plan import ConvCost, Planner


def basic(channels):
    """The convolutions of a basic block."""
    return [
        ConvCost(channels, channels, 9, out_gate='gate1'),
        ConvCost(channels, channels, 9, in_gate='gate1'),
    ]


def masks(images, channels, share, same=False, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.zeros((images, channels), bool)
    for row in rows:
        row[rng.permutation(channels)[: round(channels * share)]] = True
    return dict(gate1=rows[:1].repeat(images, 0) if same else rows)


@pytest.mark.parametrize(('channels', 'size'), [(64, 56), (128, 28), (256, 14), (512, 7)])
@pytest.mark.parametrize('share', [0.95, 1.0])
def test_nearly_open_runs_dense(channels, size, share):
    (part,) = Planner(basic(channels)).plan(masks(1, channels, share), size**2)
    assert not part.channels


@pytest.mark.parametrize(('channels', 'size'), [(64, 200), (128, 100), (256, 50), (512, 25)])
@pytest.mark.parametrize('share', [0.1, 0.3, 0.5])
def test_half_open_on_large_maps_is_gathered(channels, size, share):
    mask = masks(1, channels, share)
    (part,) = Planner(basic(channels)).plan(mask, size**2)
    assert part.exact
    assert np.array_equal(part.channels['gate1'], np.flatnonzero(mask['gate1'][0]))


def test_tiny_maps_run_dense():
    (part,) = Planner(basic(512)).plan(masks(1, 512, 0.5), 4)
    assert not part.channels


def test_images_with_equal_masks_run_together_others_alone():
    planner = Planner(basic(128))
    (part,) = planner.plan(masks(4, 128, 0.3, same=True), 100**2)
    assert part.images is None and len(part.channels['gate1']) == 38
    parts = planner.plan(masks(4, 128, 0.3), 100**2)
    assert [part.images for part in parts] == [[0], [1], [2], [3]]


def test_similar_masks_run_on_their_union():
    mask = masks(8, 128, 0.3, same=True)
    for row in mask['gate1']:  # each opens one more
        row[np.flatnonzero(~row)[0]] = True
    mask['gate1'][0, -1] = True
    (part,) = Planner(basic(128)).plan(mask, 28**2)
    assert part.images is None
    assert np.array_equal(part.channels['gate1'], np.flatnonzero(mask['gate1'].any(axis=0)))


def test_a_single_image_is_planned_as_a_batch_of_one():
    """The short way of single images decides as the cost of the parts does."""
    for channels, size in ((64, 56), (512, 7), (128, 100)):
        planner = Planner(basic(channels))
        for share in np.linspace(0.02, 1, 20):
            mask = masks(1, channels, share)
            (part,) = planner.plan(mask, size**2)
            union = planner._part(mask, None)
            cheaper = planner.cost([union], 1, size**2) < planner.cost([type(union)()], 1, size**2)
            assert bool(part.channels) == (cheaper and bool(union.channels))


def test_multipliers_that_are_not_zero_and_one_are_multiplied():
    mask = dict(gate1=np.full((1, 64), 0.5, np.float32))
    (part,) = Planner(basic(64)).plan(mask, 56**2)
    assert not part.exact
