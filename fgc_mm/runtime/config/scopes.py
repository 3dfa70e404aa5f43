# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What mmengine has to know so that configs find each other."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Optional

from mmengine.config import Config
from mmengine.config import utils as config_utils
from mmengine.utils import get_installed_path

from ...errors import UsageError
from ...tasks import scopes

SCOPE = 'fgc_mm'


def teach_config_scopes() -> None:
    """Let ``_base_ = 'mmseg::...'`` and ``'fgc_mm::...'`` resolve.

    mmengine looks an external config up by the name of a distribution, and
    takes mmseg's to be ``mmsegmentation``. The maintained line has another
    name; looked up by the module's own name it is found. fgc_mm is looked up by
    a module inside it, and so found in a clone as well as in a wheel.
    """
    packages = config_utils.MODULE2PACKAGE
    packages[SCOPE] = f'{SCOPE}.versions'
    for scope in scopes():
        try:
            metadata.version(packages.get(scope, scope))
        except metadata.PackageNotFoundError:
            packages[scope] = scope
    _keep_default_scope()


def _keep_default_scope() -> None:
    """Let what a base of fgc_mm names be looked up in the scope of its task.

    mmengine marks everything of a ``mmdet::`` base to be looked up in mmdet. Ours
    name detectors of mmdet and segmentors of mmseg, by their ``default_scope``.
    """
    upstream = Config._get_cfg_path
    if getattr(upstream, 'knows_fgc_mm', False):
        return

    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, Optional[str]]:
        if not cfg_path.startswith(f'{SCOPE}::'):
            return upstream(cfg_path, filename)
        path = find_config(cfg_path)
        if not path.is_file():
            raise FileNotFoundError(f'_base_ {cfg_path} does not exist: there is no {path}')
        return str(path), None

    get_cfg_path.knows_fgc_mm = True  # type: ignore[attr-defined]
    Config._get_cfg_path = staticmethod(get_cfg_path)


def find_config(name: str) -> Path:
    """Where a config of an installed package lies."""
    scope, _, path = name.partition('::')
    package = config_utils.MODULE2PACKAGE.get(scope, scope)
    try:
        return Path(get_installed_path(package), '.mim', 'configs', path)
    except Exception as error:  # of a kind that depends on mmengine's version
        raise UsageError(f'config {name}: {scope} is not installed') from error
