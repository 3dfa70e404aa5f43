# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Reading what ``fgc test --out figures.json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError


def read_figures(path: Path) -> list[dict[str, Any]]:
    """The metrics in a file that ``tools/test.py --out`` wrote."""
    try:
        content = json.loads(Path(path).read_text())
        tests = [point['metrics'] for point in content.get('points', [content])]
        for metrics in tests:
            float(metrics['macs/pruning_ratio'])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f'{path} holds no figures of tools/test.py --out: {error!r}') from None
    if not tests:
        raise UsageError(f'{path} holds no figures of tools/test.py --out: it has no points')
    return tests


def point_label(point: Mapping[str, Any]) -> str:
    """The setting of one test of several, such as ``budget=0.4, threshold=0.964``."""
    if 'budget' in point:
        return f'budget={point["budget"]:g}, threshold={point["threshold"]:.4g}'
    return f'threshold={point["threshold"]:g}' if 'threshold' in point else ''
