# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``python -m fgc_mm TOOL ...``: the tools, from a clone or an installed wheel.

.. code-block:: bash

    python -m fgc_mm train my_config.py    # what tools/train.py does in a clone
    python -m fgc_mm path/to/mmdetection/tools/train.py my_config.py    # any script, fgc_mm first

With fgc_mm imported before the config is read, ``_base_ = 'fgc_mm::...'`` resolves
in the tools of mmdet, mmseg and mmpretrain as well.
"""

import runpy
import sys
from pathlib import Path

TOOLS = Path(__file__).parent / '.mim' / 'tools'


def find_script(name: str) -> Path:
    """The script of a tool, or any other that is named by its path.

    Raises:
        SystemExit: If there is none; the message says what there is.
    """
    tools = {path.stem: path for path in sorted(TOOLS.glob('*.py')) if path.stem[:3] != 'dev'}
    if name in tools:
        return tools[name]
    if name.endswith('.py') and Path(name).is_file():
        return Path(name)
    known = ', '.join(tools)
    told = f'{name} is neither a tool nor a script; the' if name else 'say which tool; the'
    raise SystemExit(f'error: {told} tools are {known} (each has --help)')


def main() -> None:
    script = find_script(sys.argv[1] if len(sys.argv) > 1 else '')
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name='__main__')


if __name__ == '__main__':
    main()
