# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Runs tools/train.py again and again, each time in new processes, but imports the stack once.

Reads lines of JSON: the arguments and, for each rank, its environment and a file for its output.
Answers each with the numbers of the processes, then with number and status of each that ends."""

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

TRAIN = Path(__file__).parents[2] / 'tools' / 'train.py'


def train(args, env, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
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
    import fgc_mm.runtime.launch  # noqa: F401

    import_module(f'{package}.utils').register_all_modules(init_default_scope=False)
    for line in sys.stdin:
        args, ranks = json.loads(line)
        children = []
        for env, log in ranks:
            child = os.fork()
            if not child:
                train(args, env, log)
            children.append(child)
        print(json.dumps(children), file=answers, flush=True)
        for _ in children:
            print(json.dumps(os.wait()), file=answers, flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
