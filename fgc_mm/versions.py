# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The version of fgc_mm, and which versions of the stack fit, checked without importing any of it.

Every OpenMMLab package comes in two lines with the same import name: the
original one (``mmdet``) and the maintained one (``onedl-mmdetection``). Either
is served; a package that is absent is not missed until a config asks for it.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple, Optional

from packaging.version import Version

__version__ = '0.1.0'


class Requirement(NamedTuple):
    """An import name, its distributions and the range of versions that fits."""

    module: str
    distributions: tuple[str, ...]
    at_least: str
    below: str
    required: bool


STACK = (
    Requirement('torch', ('torch',), '2.1', '3.0', True),
    Requirement('mmengine', ('onedl-mmengine', 'mmengine', 'mmengine-lite'), '0.10.0', '1.0', True),
    Requirement('mmcv', ('onedl-mmcv', 'mmcv', 'mmcv-lite'), '2.1.0', '2.4', True),
    Requirement('mmdet', ('onedl-mmdetection', 'mmdet'), '3.3.0', '4.0', False),
    Requirement('mmseg', ('onedl-mmsegmentation', 'mmsegmentation'), '1.2.0', '2.0', False),
    Requirement('mmpretrain', ('onedl-mmpretrain', 'mmpretrain'), '1.2.0', '2.0', False),
)


def installed(requirement: Requirement) -> Optional[tuple[str, str]]:
    """Distribution and version that provide a module, or None if absent."""
    for name in requirement.distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_versions(stack: tuple[Requirement, ...] = STACK) -> None:
    """See that what is installed fits; one line for each package that does not or is missing."""
    faults = []
    for requirement in stack:
        found = installed(requirement)
        fits = f'{requirement.at_least} <= version < {requirement.below}'
        if found is None:
            if requirement.required:
                names = ' or '.join(requirement.distributions[:2])
                faults.append(f'{requirement.module} is not installed: install {names}, {fits}')
            continue
        name, version = found
        if not Version(requirement.at_least) <= Version(version) < Version(requirement.below):
            faults.append(f'{name} {version} is installed, but fgc_mm works with {fits}')
    if faults:
        raise ImportError(
            'fgc_mm does not fit the installed packages:\n  '
            + '\n  '.join(faults)
            + '\nREADME.md has the table of supported versions; '
            "`pip install 'fgc-mm[mm]'` brings the maintained line."
        )
