# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``python -m fgc_mm COMMAND ...`` is ``fgc COMMAND ...``.

``python -m fgc_mm path/to/mmdetection/tools/train.py my_config.py`` runs any script with fgc_mm
imported first, so that ``_base_ = 'fgc_mm::...'`` resolves in the tools of mmdet,
mmseg and mmpretrain.
"""

import runpy
import sys
from pathlib import Path

from .cli.main import main

if __name__ == '__main__':
    script = sys.argv[1] if len(sys.argv) > 1 else ''
    if script.endswith('.py') and Path(script).is_file():
        import fgc_mm

        fgc_mm.register()
        sys.argv = sys.argv[1:]
        runpy.run_path(script, run_name='__main__')
    else:
        main()
