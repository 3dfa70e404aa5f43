# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Dynamic channel pruning with Feature-Gate Coupling for OpenMMLab.

``import fgc_mm``, or ``custom_imports = dict(imports=['fgc_mm'])`` in a config,
registers everything under its plain name, whatever the config's default scope.
mmdet, mmseg and mmpretrain are not imported here. The names below are imported when they
are first used.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from typing import Any

from .versions import __version__, check_versions

_PUBLIC = {
    'BatchShapingHook': 'training',
    'BinConcreteGate': 'gates',
    'Budget': 'training',
    'BudgetHook': 'training',
    'Coupling': 'coupling',
    'DensityHook': 'training',
    'Distillation': 'training',
    'DistillationHook': 'training',
    'FBSGate': 'gates',
    'FGCHook': 'training',
    'FgcError': 'errors',
    'FiniteHook': 'runtime',
    'GatedMACsHook': 'evaluation',
    'L0Hook': 'training',
    'LayerCoupling': 'coupling',
    'SafeCheckpointHook': 'runtime',
    'StaticPruningHook': 'training',
    'SparseInferenceHook': 'inference',
    'count_macs': 'macs',
    'export': 'inference',
    'find_gates': 'gates',
    'find_sites': 'sites',
    'freeze': 'inference',
    'frozen_report': 'inference',
    'gate': 'sites',
    'load': 'inference',
    'prune': 'pruning',
    'save': 'inference',
    'set_threshold': 'gates',
    'slim': 'inference',
}
_REGISTERED = ('datasets', 'evaluation', 'gates', 'inference', 'nets', 'runtime', 'training')

__all__ = ['__version__', 'register', *_PUBLIC]


def register() -> None:
    """Put gates, networks, hooks, metrics and datasets into OpenMMLab's registries.

    Raises:
        ImportError: If an installed package does not fit.
    """
    check_versions()
    for room in _REGISTERED:
        importlib.import_module(f'.{room}', __name__)
    from .runtime.config.scopes import teach_config_scopes

    teach_config_scopes()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'.{_PUBLIC[name]}', __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_command() -> bool:
    """Whether this is the start of ``fgc``, ``python -m fgc_mm`` or a script of ``tools/``. They
    register before they run a command: their help needs neither torch nor mmengine, which
    take seconds. A process that they spawn is none of them."""
    started = sys.argv[0] if sys.argv else ''
    folder, name = os.path.split(os.path.realpath(started))
    tools = os.path.realpath(os.path.join(os.path.dirname(__file__), '.mim', 'tools'))
    return multiprocessing.parent_process() is None and (
        (started == '-m' and __name__ in sys.orig_argv)
        or os.path.splitext(name)[0] == 'fgc'
        or folder == tools
    )


if not _is_command():
    register()
