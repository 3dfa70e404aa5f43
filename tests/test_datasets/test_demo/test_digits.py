# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import cv2
import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from fgc_mm.datasets.demo.detection import STYLE, draw_detection_scenes, is_difficult, is_truncated
from fgc_mm.datasets.demo.digits import draw_digit, load_digits, shuffled
from fgc_mm.datasets.demo.scene import draw_scene


def test_split_is_stratified_disjoint_and_complete():
    digits = load_digits()
    train, val = digits.splits['train'], digits.splits['val']
    assert np.bincount(digits.labels[val]).tolist() == [36] * 10
    assert not set(train) & set(val)
    assert sorted([*train, *val]) == list(range(1797))
    # Disjoint by content, too: no picture of val is also in train.
    pictures = sklearn_datasets.load_digits().data
    assert not set(map(bytes, pictures[train])) & set(map(bytes, pictures[val]))


@pytest.mark.parametrize('size', [20, 28, 56])
def test_drawn_digit_is_the_digit(size):
    """Scaled down again, a drawing is nearest to the digit it was made of."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    chosen = rng.choice(1797, 40, replace=False)
    originals = digits.images.reshape(1797, 64)
    originals = originals - originals.mean(axis=1, keepdims=True)
    originals /= np.linalg.norm(originals, axis=1, keepdims=True)
    right = 0
    for index in chosen:
        ink = draw_digit(digits.images[index], size, rng, max_angle=0.0)
        margin = (len(ink) - size) // 2
        small = cv2.resize(
            ink[margin : margin + size, margin : margin + size],
            (8, 8),
            interpolation=cv2.INTER_AREA,
        ).ravel()
        small -= small.mean()
        nearest = int(np.argmax(originals @ small))
        right += digits.labels[nearest] == digits.labels[index]
    assert right >= 38


def test_drawn_ink_is_ink_or_paper_with_a_soft_edge():
    digits = load_digits()
    rng = np.random.default_rng(1)
    for index in range(0, 1797, 60):
        ink = draw_digit(digits.images[index], 48, rng)
        assert ink.min() == 0 and 0.85 < ink.max() <= 1
        frame = ink.copy()
        frame[1:-1, 1:-1] = 0
        assert not frame.any()
        edge = (ink > 0) & (ink < 0.5)
        assert 0 < edge.sum() < 0.5 * (ink >= 0.5).sum()


def test_stream_uses_every_digit_before_any_twice():
    stream = shuffled([3, 5, 8], np.random.default_rng(0))
    assert sorted(next(stream) for _ in range(3)) == [3, 5, 8]
    assert sorted(next(stream) for _ in range(3)) == [3, 5, 8]


def test_boxes_are_tight_around_what_was_drawn():
    """Against the difference of the picture and the same picture without digits."""
    stream = shuffled(load_digits().splits['val'], np.random.default_rng(0))
    checked = 0
    for number in range(25):
        scene = draw_scene(np.random.default_rng(number), stream, 4, STYLE)
        changed = np.abs(scene.image.astype(int) - scene.background).max(axis=2)
        far = np.ones(changed.shape, bool)
        for digit in scene.digits:
            x1, y1, x2, y2 = digit.box
            assert 0 <= x1 < x2 < 128 and 0 <= y1 < y2 < 128
            far[max(0, y1 - 3) : y2 + 4, max(0, x1 - 3) : x2 + 4] = False
            if is_difficult(digit):
                continue
            mine = np.where(digit.ink > 0, changed, 0)
            box = mine[y1 : y2 + 1, x1 : x2 + 1]
            strong = 0.3 * np.median(box[box > 20])
            # Ink reaches all four sides of the box, and outside only a soft edge is left.
            assert all(side.max() > strong for side in (box[0], box[-1], box[:, 0], box[:, -1]))
            assert mine.sum() - box.sum() < 0.08 * mine.sum()
            checked += 1
        assert not changed[far].any()
    assert checked > 70


def test_difficult_and_truncated_are_what_they_say():
    flags = []
    for scene in draw_detection_scenes('val'):
        for digit in scene.digits:
            x1, y1, x2, y2 = digit.box
            at_border = x1 == 0 or y1 == 0 or x2 == 127 or y2 == 127
            assert is_truncated(digit) == at_border
            ink = scene.image[digit.ink >= 0.5].astype(float).mean(axis=0)
            near = scene.background[digit.ink >= 0.5].astype(float).mean(axis=0)
            faint = np.abs(ink - near).max() < 32
            if faint:
                assert is_difficult(digit)
            flags.append((is_truncated(digit), is_difficult(digit)))
    truncated, difficult = np.mean(flags, axis=0)
    assert 0.05 < truncated < 0.2
    assert 0.03 < difficult < 0.12


def test_digits_of_a_scene_do_not_hide_each_other():
    for scene in draw_detection_scenes('val')[:40]:
        assert 2 <= len(scene.digits) <= 6
        assert (np.stack([d.ink for d in scene.digits]) > 0.1).sum(axis=0).max() == 1
