# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Dynamic channel pruning with Feature-Gate Coupling for OpenMMLab.

``import fgc_mm``, or ``custom_imports = dict(imports=['fgc_mm'])`` in a config,
registers everything under its plain name, whatever the config's default scope.
mmdet, mmseg and mmpretrain are not imported here.
"""

from .versions import check_versions

check_versions()

from . import backbones, datasets, engine, evaluation, gates, inference  # noqa: E402
from .registration import teach_config_scopes  # noqa: E402

teach_config_scopes()

__version__ = '0.1.0'

__all__ = ['__version__', 'backbones', 'datasets', 'engine', 'evaluation', 'gates', 'inference']
