#!/usr/bin/env python3
# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sets the development environment up and runs things in it.

    python3 tools/dev.py demo     train and test the demo detector
    python3 tools/dev.py test     lint, type and import checks, tests
    python3 tools/dev.py setup    only the environment
    python3 tools/dev.py run ...  any command inside it
    python3 tools/dev.py audit    licenses and known vulnerabilities of the dependencies
    python3 tools/dev.py lock     resolve the pinned versions anew

`test`, `setup`, `run` and `audit` take `--line original`: the same with OpenMMLab's
original packages, in an environment of its own. Needs Python 3.11 with pip and, the
first time, a C++ compiler (tools/dev_env.py says why).
"""

import argparse
import json
import os
import subprocess
import sys

from dev_env import LINES, NETWORK_HINT, ROOT, SetupError, call, find_python, find_uv, say

DEMO_CONFIG = os.path.join('configs', 'demo', 'faster_rcnn_r18_digits_gated.py')


def demo(line, work_dir):
    """Train the demo detector, test it, and say what came out."""
    code = line.in_env([line.python, 'tools/train.py', DEMO_CONFIG, '--work-dir', work_dir])
    if code:
        return code
    with open(os.path.join(ROOT, work_dir, 'last_checkpoint')) as file:
        checkpoint = file.read().strip()
    pictures = os.path.join(work_dir, 'pictures')
    results = os.path.join(work_dir, 'results.json')
    cmd = [line.python, 'tools/test.py', DEMO_CONFIG, checkpoint, '--work-dir', work_dir]
    code = line.in_env(cmd + ['--show-dir', pictures, '--out', results])
    if code:
        return code
    with open(os.path.join(ROOT, results)) as file:
        metrics = json.load(file)['metrics']
    print('\nDemo finished: %s' % DEMO_CONFIG)
    for key in sorted(metrics):
        value = metrics[key]
        print('  %-28s %s' % (key, '%.4g' % value if isinstance(value, float) else value))
    print('  %-28s %s' % ('checkpoint', os.path.relpath(checkpoint, ROOT)))
    print('  %-28s %s' % ('predictions drawn in', pictures))
    return 0


def test(line, slow, args):
    """What CI runs: lint, types, imports, tests; all but the tests for the maintained line only."""
    workers = str(min(os.cpu_count() or 1, 4))
    bin_dir = os.path.join(line.venv, 'bin')
    checks = [
        [os.path.join(bin_dir, 'ruff'), 'check', '.'],
        [os.path.join(bin_dir, 'ruff'), 'format', '--check', '.'],
        [os.path.join(bin_dir, 'mypy')],
        [os.path.join(bin_dir, 'lint-imports'), '--no-cache', '--no-logo'],
    ]
    if slow or args or line.name != 'maintained':
        checks = []
    pytest = [line.python, '-m', 'pytest', '-m', 'slow' if slow else 'not slow']
    if not slow:
        pytest += ['-n', workers, '--dist', 'loadfile', '--durations', '10']
    failed = [cmd for cmd in checks if line.in_env(cmd)]
    threads = {'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '2' if slow else '1')}
    if line.in_env(pytest + args, threads):
        failed.append(pytest)
    for cmd in failed:
        say('FAILED: ' + ' '.join(os.path.relpath(c, ROOT) if os.path.isabs(c) else c for c in cmd))
    return 1 if failed else 0


def lock():
    """Resolve the .in files of both lines into exact versions for every platform."""
    uv = find_uv(find_python())
    for line in LINES.values():
        pins = os.path.relpath(line.pins, ROOT)
        cmd = [uv, 'pip', 'compile', pins.replace('.txt', '.in'), '-o', pins]
        cmd += ['--universal', '--python-version', '3.11', '--no-header', '--no-annotate']
        call(cmd, 'Resolving the versions', NETWORK_HINT, cwd=ROOT, stdout=subprocess.DEVNULL)


def audit(line):
    """Licenses and known vulnerabilities of the packages of a line."""
    uv = find_uv(find_python())
    script = os.path.join('tools', 'dev_audit.py')
    return line.in_env([line.python, script, uv, line.pins, line.mmcv])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    commands = parser.add_subparsers(dest='command')
    sub = commands.add_parser('demo', help='train and test the demo detector')
    sub.add_argument('--work-dir', default=os.path.join('work_dirs', 'demo'))
    with_line = argparse.ArgumentParser(add_help=False)
    with_line.add_argument(
        '--line', choices=sorted(LINES), default='maintained', help='which OpenMMLab packages'
    )
    sub = commands.add_parser('test', parents=[with_line], help='all checks, and tests')
    sub.add_argument('--slow', action='store_true', help='the slow training checks instead')
    sub.add_argument('args', nargs='*', help='passed to pytest (after --)')
    sub = commands.add_parser('setup', parents=[with_line], help='only the environment')
    sub.add_argument('--rebuild', action='store_true', help='make it anew')
    sub = commands.add_parser('run', parents=[with_line], help='any command inside the environment')
    sub.add_argument('args', nargs=argparse.REMAINDER)
    commands.add_parser('audit', parents=[with_line], help='licenses, known vulnerabilities')
    commands.add_parser('lock', help='resolve the pinned versions anew')
    options = parser.parse_args()
    if not options.command:
        parser.error('say what to do: demo, test, setup, run, audit or lock')
    line = LINES[getattr(options, 'line', 'maintained')]
    try:
        if options.command == 'lock':
            return lock()
        line.setup(getattr(options, 'rebuild', False))
    except SetupError as error:
        sys.stderr.write('\n[fgc_mm] error: %s\n' % error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write('\n[fgc_mm] interrupted; the same command goes on where it stopped\n')
        return 130
    if options.command == 'demo':
        return demo(line, options.work_dir)
    if options.command == 'test':
        return test(line, options.slow, options.args)
    if options.command == 'audit':
        return audit(line)
    if options.command == 'run':
        return line.in_env(options.args or [line.python])
    return 0


if __name__ == '__main__':
    sys.exit(main())
