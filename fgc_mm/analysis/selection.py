# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What somebody asks to look at: pictures, runs and checkpoints by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..errors import UsageError
from .gate_table import GateTable


def saved_epochs(checkpoint: Path) -> list[Path]:
    """The checkpoints of a training up to this one, in order."""

    def step(path: Path) -> int:
        found = re.search(r'_(\d+)$', path.stem)
        return int(found.group(1)) if found else -1

    kind = checkpoint.stem.rpartition('_')[0]
    others = checkpoint.parent.glob(f'{kind}_*.pth') if kind and step(checkpoint) >= 0 else []
    found = {path for path in others if 0 <= step(path) < step(checkpoint)}
    return [*sorted(found, key=step), checkpoint]


def find_picture(table: GateTable, wanted: str) -> int:
    """The row of the picture that ``--query`` names, by its number or its file."""
    if re.fullmatch(r'-?\d+', wanted):
        return int(wanted)
    found = [n for n, path in enumerate(table.paths) if path and Path(path).match(wanted)]
    if len(found) != 1:
        way = (
            f'or by its file ({len(found)} have this one)'
            if any(table.paths)
            else 'no file is known'
        )
        raise UsageError(
            f'--query {wanted}: name a picture by its number, 0 to {len(table) - 1}, {way}'
        )
    return found[0]


def run_names(given: Optional[Sequence[str]], paths: Sequence[Path]) -> list[str]:
    """Names of runs: as given, else of their folders, or of their files in a common one."""
    if given is not None:
        if len(given) != len(paths) or len(set(given)) != len(given):
            many = f'{len(paths)} different names' if len(paths) > 1 else 'one name'
            raise UsageError(f'--names {" ".join(given)} must be {many}')
        return list(given)
    deepest = max(len(p.parent.parts) for p in paths)
    longer = (['/'.join(p.parent.parts[-n:]) for p in paths] for n in range(2, deepest + 1))
    shorter = [p.stem if len({p.parent for p in paths}) == 1 else p.parent.name for p in paths]
    for choice in (shorter, *longer):
        if len(set(choice)) == len(paths) and '' not in choice:
            return choice
    return [f'{number}: {path.stem}' for number, path in enumerate(paths, 1)]
