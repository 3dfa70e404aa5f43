# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Single digits in ImageNet's folder layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .digits import SEED, load_digits
from .scene import SceneStyle, draw_scene, write_image

STYLE = SceneStyle(size=32, digit_size=(23.0, 28.0), contrast=(70.0, 140.0), margin=1)
# Pictures of every digit, each on another background.
PICTURES = {'train': 2, 'val': 1}


def build_classification(root: Path) -> dict[str, dict[str, list[int]]]:
    """Write ``{train,val}/<digit>/<index>_<picture>.png``."""
    digits = load_digits()
    sources: dict[str, dict[str, list[int]]] = {}
    for split, indices in digits.splits.items():
        sources[split] = {}
        for index in (int(i) for i in indices):
            for picture in range(PICTURES[split]):
                rng = np.random.default_rng([SEED, 1, index, picture])
                scene = draw_scene(rng, iter([index]), 1, STYLE)
                name = f'{digits.labels[index]}/{index:04d}_{picture}'
                write_image(root / split / f'{name}.png', scene.image)
                sources[split][name] = [index]
    return sources
