# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a work dir tells about its run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import yaml
from mmengine.config import Config

from ..errors import UsageError
from ..evaluation.summary import add_derived
from ..runtime.config.files import read_config
from .gate_table import GateTable
from .tradeoff import read_figures
from .training import Curves, last_validation, read_curves


@dataclass
class ReportRun:
    """One run of a report."""

    name: str
    folder: Path
    cfg: Config
    config_name: str
    """Path of the config file if the test tells it, else its name, without ending."""
    checkpoint: Optional[Path] = None
    metrics: dict[str, Any] = field(default_factory=dict)
    measured: str = ''
    """What the metrics are of: a test, and in which file, or the last validation."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """Rows of its gates, see :func:`~fgc_mm.evaluation.layer_rows`."""
    published: list[dict[str, Any]] = field(default_factory=list)
    """Figures of the model index for this config."""
    curves: Curves = field(default_factory=dict)
    table: Optional[GateTable] = None
    note: str = ''
    """Why there is no table."""


def read_run(folder: Path, name: Optional[str] = None) -> ReportRun:
    """Read a work dir, without running its network."""
    if not folder.is_dir():
        raise UsageError(f'work dir {folder} does not exist')
    config = find_config(folder)
    cfg = read_config(str(config))
    cfg.launcher = 'none'
    run = ReportRun(name or folder.resolve().name, folder, cfg, config.stem)
    run.checkpoint = find_checkpoint(folder)
    with suppress(UsageError):  # a test only
        run.curves = read_curves(folder)
    if not any(_take_figures(run, folder / file) for file in ('figures.json', 'results.json')):
        run.metrics = last_validation(folder)
        run.measured = 'last validation' if run.metrics else ''
    run.metrics = add_derived(run.metrics)
    run.published = published_figures(run.config_name)
    return run


def find_config(folder: Path) -> Path:
    """The config a run was started with."""
    found = _own(sorted(folder.glob('*.py'), key=lambda path: path.stat().st_mtime))
    found = found or sorted(folder.glob('*/vis_data/config.py'))
    if not found:
        what = 'is empty' if not any(folder.iterdir()) else 'holds no config (*.py)'
        raise UsageError(
            f'work dir {folder} {what}; name a folder that tools/train.py wrote to, such as '
            'work_dirs/<config>'
        )
    return found[-1]


def find_checkpoint(folder: Path) -> Optional[Path]:
    """The last checkpoint of a run, None if there is none."""
    last = folder / 'last_checkpoint'
    if last.is_file():
        path = folder / Path(last.read_text().strip()).name
        if path.is_file():
            return path
    found = [path for path in folder.glob('*.pth') if not path.name.endswith('.banks.pth')]
    return max(_own(found), key=lambda path: path.stat().st_mtime, default=None)


def _own(paths: list[Path]) -> list[Path]:
    """Without what ``tools/slim.py`` left there, unless that is all."""
    return [path for path in paths if not path.stem.endswith('_slim')] or paths


def _take_figures(run: ReportRun, path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        run.metrics = read_figures(path)[0]
    except ValueError:
        return False
    content = json.loads(path.read_text())
    run.layers = content.get('layers') or []
    run.measured = f'test ({path.name})'
    config = content.get('config')
    if isinstance(config, str):
        run.config_name = Path(config).with_suffix('').as_posix()
    return True


def published_figures(config_name: str) -> list[dict[str, Any]]:
    """Figures of the model index for a config, named by its path or its name, without ending.

    A name may fit several; ``source`` says which, and who reported or measured the ``metrics``.
    """
    package = Path(__file__).parents[1]
    places = [root / 'configs' / 'metafile.yml' for root in (package.parent, package / '.mim')]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    models = yaml.safe_load(path.read_text(encoding='utf-8')).get('Models') or []
    found = []
    for model in models:
        known = Path(model.get('Config', '')).with_suffix('').as_posix()
        if not f'/{known}'.endswith(f'/{config_name}') and not config_name.endswith(f'/{known}'):
            continue
        for result in model.get('Results') or []:
            who = result.get('Reported By') or 'measured by this project'
            found.append(dict(source=f'{who}: {known}', metrics=dict(result['Metrics'])))
    return found
