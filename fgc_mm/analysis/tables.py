# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Tidy tables on disk: one row for each observation."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_files

Row = Mapping[str, Any]


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """Write rows with the keys of the first as header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    write_files({path: text.getvalue()})
    return path


def _cell(value: Any) -> Any:
    return f'{value:.6g}' if isinstance(value, float) else value
