# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Writing picture files."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np


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
