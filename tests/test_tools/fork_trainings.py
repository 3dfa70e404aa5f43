# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Runs tools/train.py again and again, each time in a new process, but imports the stack once.

Reads lines of JSON, the arguments and a file for the output; answers each with the number of
the process, and with its exit status once it has ended."""

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

TRAIN = Path(__file__).parents[2] / 'tools' / 'train.py'


def train(args, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ['train.py', *args]
    code = 1
    try:
        runpy.run_path(str(TRAIN), run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(package):
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # where packages print while they are imported
    import fgc_mm.engine.launch  # noqa: F401

    import_module(f'{package}.utils').register_all_modules(init_default_scope=False)
    for line in sys.stdin:
        args, log = json.loads(line)
        child = os.fork()
        if not child:
            train(args, log)
        print(child, file=answers, flush=True)
        print(os.waitpid(child, 0)[1], file=answers, flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
