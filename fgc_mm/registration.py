# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What mmengine has to know so that configs find each other."""

from __future__ import annotations

from importlib import metadata

from mmengine.config import utils as config_utils


def teach_config_scopes() -> None:
    """Let ``_base_ = 'mmseg::...'`` and ``'fgc_mm::...'`` resolve.

    mmengine looks an external config up by the name of a distribution, and
    takes mmseg's to be ``mmsegmentation``. The maintained line has another
    name; looked up by the module's own name it is found.
    """
    scopes = config_utils.MODULE2PACKAGE
    scopes.setdefault('fgc_mm', 'fgc_mm')
    try:
        metadata.version(scopes['mmseg'])
    except metadata.PackageNotFoundError:
        scopes['mmseg'] = 'mmseg'
