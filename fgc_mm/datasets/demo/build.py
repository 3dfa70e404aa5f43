# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Building the demo data once, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Union

from filelock import FileLock

from ...errors import UsageError
from ...files import discard
from .classification import build_classification
from .detection import build_detection
from .segmentation import build_segmentation

# Raise it whenever a picture or a file changes: folders of other versions are rebuilt.
DEMO_VERSION = 5
MANIFEST = 'manifest.json'
_BUILDERS: dict[str, Callable[[Path], dict[str, dict[str, list[int]]]]] = {
    'classification': build_classification,
    'detection': build_detection,
    'segmentation': build_segmentation,
}
DEMO_KINDS = tuple(_BUILDERS)


def ensure_demo_data(
    root: Union[str, os.PathLike] = 'data/demo',
    kinds: Union[str, Sequence[str]] = DEMO_KINDS,
    force: bool = False,
) -> None:
    """Build the demo data that is not there yet.

    A folder is built beside its place and renamed when it is complete, so it is
    never seen half written. Any number of processes may call this at once: one
    builds, the others wait. What is there is only checked, which takes
    milliseconds.

    Args:
        root (str | os.PathLike): Folder of the demo data. Defaults to
            ``'data/demo'``.
        kinds (str | Sequence[str]): Any of ``'classification'``, ``'detection'`` and
            ``'segmentation'``. Defaults to all of them.
        force (bool): Build again what is there already. Defaults to False.
    """
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if not set(kinds) <= set(DEMO_KINDS):
        raise UsageError(f'kinds={kinds} must be a list with any of {", ".join(DEMO_KINDS)}')
    for kind in kinds:
        target = Path(root) / kind
        if force or not is_complete(target, kind):
            _build_alone(target, kind, force)


def is_complete(folder: Path, kind: str) -> bool:
    """Whether a folder holds this version of the demo data, every file at its size."""
    manifest = _read_manifest(folder)
    if manifest.get('kind') != kind or manifest.get('version') != DEMO_VERSION:
        return False
    return manifest['sizes'] == _sizes(folder, manifest['sizes'])


def _build_alone(target: Path, kind: str, force: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f'.{kind}.lock'):
        if not force and is_complete(target, kind):
            return
        # Whoever made these was stopped: nobody else builds while we hold the lock.
        for left_over in target.parent.glob(f'.{kind}.building-*'):
            discard(str(left_over))
        began = time.perf_counter()
        building = target.with_name(f'.{kind}.building-{os.getpid()}')
        building.mkdir()
        try:
            count = _write(building, kind)
            note = _replace(target, building)
        finally:
            discard(str(building))
        seconds = time.perf_counter() - began
        print(f'demo data: built {target} ({count} files, {seconds:.1f} s){note}', flush=True)


def _write(folder: Path, kind: str) -> int:
    _write_json(folder / 'digits.json', _BUILDERS[kind](folder))
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file())
    sizes = _sizes(folder, names)
    manifest = dict(kind=kind, version=DEMO_VERSION, files=len(names), sizes=sizes)
    _write_json(folder / MANIFEST, manifest)
    return len(names)


def _replace(target: Path, building: Path) -> str:
    """Put the new folder in place; what was not built by us is kept beside it."""
    if not target.exists():
        building.rename(target)
        return ''
    ours = 'kind' in _read_manifest(target)
    number = 1
    while (aside := target.with_name(f'{target.name}.old-{number}')).exists():
        number += 1
    target.rename(aside)
    building.rename(target)
    if ours:
        shutil.rmtree(aside)
        return ''
    return f'; what was there had no {MANIFEST} and is now {aside}'


def _read_manifest(folder: Path) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and 'sizes' in manifest else {}


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Of the files that are there."""
    paths = {name: os.path.join(folder, name) for name in names}
    return {name: os.path.getsize(path) for name, path in paths.items() if os.path.isfile(path)}


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8', newline='\n')
