# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Tidy tables on disk: one row for each observation."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """Write rows with the keys of the first as header; an older file stays until this is whole.

    Args:
        rows (Sequence[Mapping]): The rows, at least one.
        path (Path): The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + '.part')
    with open(fresh, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    os.replace(fresh, path)
    return path


def _cell(value: Any) -> Any:
    return f'{value:.6g}' if isinstance(value, float) else value
