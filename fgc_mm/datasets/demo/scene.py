# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures of several digits on a textured background."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from .digits import draw_digit, load_digits

_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True)
class DrawnDigit:
    """One digit of a scene."""

    index: int  # which of scikit-learn's digits it is
    label: int
    ink: np.ndarray  # H x W of the scene, 0 to 1, how much ink covers a pixel
    visible: float  # share of the digit's ink inside the picture
    contrast: float  # mean difference of ink and surrounding, in gray levels

    @property
    def box(self) -> tuple[int, int, int, int]:
        """First and last column and row of the ink: x1, y1, x2, y2, inclusive."""
        return _ink_box(self.ink)


@dataclass(frozen=True)
class Scene:
    """A picture, what it would be without digits, and its digits, largest first."""

    image: np.ndarray  # H x W x 3, RGB, uint8
    background: np.ndarray
    digits: list[DrawnDigit]


@dataclass(frozen=True)
class SceneStyle:
    """How scenes are drawn."""

    size: int  # height and width of the picture
    digit_size: tuple[float, float]  # range of the digits' heights
    contrast: tuple[float, float]  # range of ink contrast in gray levels
    margin: int  # pixels kept free around the ink of every digit
    faint: float = 0.0  # share of digits drawn with hardly any contrast
    cut: float = 0.0  # share of digits that the border of the picture cuts


def draw_background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Two colors mixed by cloudy or striped texture, and fine grain, in 0 to 255."""
    level = rng.uniform(50, 205)
    first, second = (level + rng.normal(0, 22, (2, 3))).astype(np.float32)
    clouds = np.zeros((size, size), np.float32)
    for cells, weight in ((3, 1.0), (6, 0.6), (12, 0.35)):
        coarse = rng.standard_normal((cells, cells), np.float32)
        clouds += weight * cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
    if rng.random() < 0.4:
        angle, period = rng.uniform(0, np.pi), rng.uniform(0.08, 0.25) * size
        steps = np.arange(size, dtype=np.float32) * np.float32(2 * np.pi / period)
        wave = np.float32(np.cos(angle)) * steps + np.float32(np.sin(angle)) * steps[:, None]
        clouds += 0.8 * np.sin(wave)
    mix = 1 / (1 + np.exp(-1.2 * clouds[..., None]))
    grain = 5 * rng.standard_normal((size, size, 1), np.float32)
    return np.clip(first * mix + second * (1 - mix) + grain, 0, 255)


def draw_scene(
    rng: np.random.Generator, stream: Iterator[int], count: int, style: SceneStyle
) -> Scene:
    canvas = _Canvas(rng, style)
    background = _to_uint8(canvas.image)
    low, high = np.log(style.digit_size)
    # Even over the logarithm, so that small digits are as frequent as large ones.
    for size in sorted(np.exp(rng.uniform(low, high, count)), reverse=True):
        canvas.add(next(stream), float(size))
    return Scene(_to_uint8(canvas.image), background, canvas.digits)


class _Canvas:
    """A scene in the making."""

    def __init__(self, rng: np.random.Generator, style: SceneStyle) -> None:
        self.rng = rng
        self.style = style
        self.image = draw_background(rng, style.size)
        self.taken = np.zeros((style.size, style.size), bool)
        self.digits: list[DrawnDigit] = []

    def add(self, index: int, size: float) -> None:
        """Draw a digit where there is room, or leave it out if there is none."""
        rng, style, source = self.rng, self.style, load_digits()
        cut, faint = rng.random() < style.cut, rng.random() < style.faint
        for _ in range(12):
            placed = self._place(draw_digit(source.images[index], size, rng), cut)
            if placed is not None:
                break
            # No room: try a little smaller, and not at the border, where room is scarce.
            size, cut = max(0.9 * size, style.digit_size[0]), False
        else:
            return
        ink, visible = placed
        x1, y1, x2, y2 = _ink_box(ink)
        reach = 6
        near = np.s_[max(0, y1 - reach) : y2 + reach + 1, max(0, x1 - reach) : x2 + reach + 1]
        local, picture = ink[near], self.image[near]
        self.taken[near] |= _grow(local, style.margin) > 0.1
        around = (_grow(local, 4) > 0.1) & (local < 0.05)
        color = self._ink_color(picture[around].mean(axis=0), faint)
        grain = 4 * rng.standard_normal((*local.shape, 1), np.float32)
        picture += (np.clip(color + grain, 0, 255) - picture) * local[..., None]
        difference = picture[local >= 0.5].mean(axis=0) - picture[around].mean(axis=0)
        contrast = float(np.sqrt(np.mean(difference**2)))
        label = int(source.labels[index])
        self.digits.append(DrawnDigit(index, label, ink, visible, contrast))

    def _place(self, patch: np.ndarray, cut: bool) -> tuple[np.ndarray, float] | None:
        """Ink of the whole picture and visible share, or None if nothing is free."""
        rng, size = self.rng, self.style.size
        x1, y1, x2, y2 = _ink_box(patch, 0.02)
        patch = patch[y1 : y2 + 1, x1 : x2 + 1]
        extent = np.array(patch.shape)
        edge = min(self.style.margin, (size - int(extent.max())) // 2)
        for _ in range(40):
            corner = rng.integers(edge, size - edge - extent, endpoint=True)
            if cut:
                axis, far = rng.integers(2), rng.random() < 0.5
                hidden = max(4, round(rng.uniform(0.12, 0.45) * extent[axis]))
                corner[axis] = size - extent[axis] + hidden if far else -hidden
            top, left = np.maximum(corner, 0)
            bottom, right = np.minimum(corner + extent, size)
            part = patch[top - corner[0] : bottom - corner[0], left - corner[1] : right - corner[1]]
            visible = float(part.sum() / patch.sum())
            hits_ink = (self.taken[top:bottom, left:right] & (part > 0.1)).any()
            if hits_ink or visible < 0.5 or self._crowded(left, top, right - 1, bottom - 1):
                continue
            ink = np.zeros((size, size), np.float32)
            ink[top:bottom, left:right] = part
            return ink, visible
        return None

    def _crowded(self, x1: int, y1: int, x2: int, y2: int) -> bool:
        """Whether a box shares too much with another, as a one inside a zero would."""
        area = (x2 - x1 + 1) * (y2 - y1 + 1)
        for digit in self.digits:
            u1, v1, u2, v2 = digit.box
            shared = max(0, min(x2, u2) - max(x1, u1) + 1) * max(0, min(y2, v2) - max(y1, v1) + 1)
            if shared > 0.15 * min(area, (u2 - u1 + 1) * (v2 - v1 + 1)):
                return True
        return False

    def _ink_color(self, beneath: np.ndarray, faint: bool) -> np.ndarray:
        rng, level = self.rng, float(beneath @ _LUMINANCE)
        if faint:
            return beneath + rng.uniform(14, 22) * (1 if level < 128 else -1)
        distance = rng.uniform(*self.style.contrast)
        darker = rng.random() < np.clip((level - 60) / 135, 0, 1)
        target = np.clip(level - distance if darker else level + distance, 8, 247)
        tint = rng.normal(0, 1, 3).astype(np.float32)
        tint -= tint @ _LUMINANCE
        return np.clip(target + rng.uniform(0, 40) * tint, 0, 255)


def _ink_box(ink: np.ndarray, least: float = 0.5) -> tuple[int, int, int, int]:
    columns = np.flatnonzero((ink >= least).any(axis=0))
    rows = np.flatnonzero((ink >= least).any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def _grow(ink: np.ndarray, pixels: int) -> np.ndarray:
    return cv2.dilate(ink, np.ones((2 * pixels + 1, 2 * pixels + 1), np.uint8))


def _to_uint8(image: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def write_image(path: Path, image: np.ndarray) -> None:
    """Write an RGB picture or a label map; the suffix decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if image.ndim == 3:
        image = np.ascontiguousarray(image[..., ::-1])
    options = [cv2.IMWRITE_JPEG_QUALITY, 95] if path.suffix == '.jpg' else []
    done, data = cv2.imencode(path.suffix, image, options)
    if not done:
        raise OSError(f'OpenCV cannot encode {path}')
    path.write_bytes(data.tobytes())
