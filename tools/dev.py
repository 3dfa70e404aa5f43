#!/usr/bin/env python3
# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sets the development environment up and runs things in it.

    python3 tools/dev.py demo     train and test the demo detector
    python3 tools/dev.py test     lint, type check and tests
    python3 tools/dev.py setup    only the environment
    python3 tools/dev.py run ...  any command inside it
    python3 tools/dev.py lock     resolve the pinned versions anew

Needs Python 3.11 with pip and, the first time, a C++ compiler: mmcv comes as
source. Its wheel is built once per user and torch version and kept in
~/.cache/fgc_mm/wheels; a folder with a prebuilt one can be named by the
environment variable FGC_MM_WHEELS. Only the standard library is used here, and
only syntax that old Pythons read, so that they get a message and not a riddle.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, '.venv')
PYTHON = os.path.join(VENV, 'bin', 'python')
STAMP = os.path.join(VENV, 'fgc_mm.stamp')
PINS = os.path.join(ROOT, 'tools', 'dev_requirements.txt')
MMCV = 'onedl-mmcv==2.3.6'
DEMO_CONFIG = os.path.join('configs', 'demo', 'faster_rcnn_r18_digits_gated.py')

CHECK_OPS = """
import torch, mmcv.ops
boxes = torch.tensor([[0., 0., 9., 9.], [0., 0., 9., 8.], [20., 20., 30., 30.]])
kept = mmcv.ops.nms(boxes, torch.tensor([.9, .8, .7]), .5)[1].tolist()
assert kept == [0, 2], kept
out = mmcv.ops.roi_align(torch.ones(1, 1, 8, 8), torch.tensor([[0., 0., 0., 7., 7.]]), (2, 2))
assert out.allclose(torch.ones(1, 1, 2, 2))
"""


class SetupError(Exception):
    """Something a user can mend; the message says how."""


def say(text):
    print('[fgc_mm] ' + text, flush=True)


def call(cmd, why, hint, **kwargs):
    """Run a command with its output visible; fail with a cause and a next step."""
    try:
        code = subprocess.call(cmd, **kwargs)
    except OSError as error:
        raise SetupError('%s failed: %s.\n%s' % (why, error, hint)) from error
    if code:
        raise SetupError('%s failed (exit code %d, output above).\n%s' % (why, code, hint))


NETWORK_HINT = (
    'If the package index could not be reached, check the network and the proxy settings\n'
    '(HTTPS_PROXY, PIP_INDEX_URL / UV_DEFAULT_INDEX), then run the same command again:\n'
    'what is installed already is kept.'
)


def find_python():
    """The interpreter the environment is made from."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    other = shutil.which('python3.11')
    if other:
        return other
    raise SetupError(
        'The development environment needs Python 3.11, and this is %s (%s).\n'
        'Install Python 3.11 (for example `apt-get install python3.11 python3.11-dev` or\n'
        '`pyenv install 3.11`) and run: python3.11 tools/dev.py ...'
        % (platform.python_version(), sys.executable)
    )


def find_uv(python):
    """uv from PATH, or from the package index into a folder of the project."""
    found = shutil.which('uv')
    if found:
        return found
    folder = os.path.join(ROOT, '.tools')
    uv = os.path.join(folder, 'bin', 'uv')
    if not os.access(uv, os.X_OK):
        say('installing uv into .tools/')
        call(
            [python, '-m', 'pip', 'install', '--quiet', '--upgrade', '--target', folder, 'uv>=0.5'],
            'Installing uv with pip',
            'pip must work for %s (`%s -m ensurepip` adds it).\n%s'
            % (python, python, NETWORK_HINT),
        )
    return uv


def answers(code):
    """What the environment's Python prints for a line of code, or None."""
    try:
        out = subprocess.run(
            [PYTHON, '-c', code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
        )
    except OSError:
        return None
    return out.stdout.strip() if out.returncode == 0 else None


def fingerprint():
    """What the environment was made of; another one is installed anew."""
    digest = hashlib.sha256()
    for path in (PINS, os.path.join(ROOT, 'pyproject.toml')):
        with open(path, 'rb') as file:
            digest.update(file.read())
    digest.update((MMCV + ROOT).encode())
    # Another wheel handed in, or a CUDA compiler that is there now.
    digest.update(repr((os.environ.get('FGC_MM_WHEELS'), bool(shutil.which('nvcc')))).encode())
    return digest.hexdigest()


def has_ops(wheel):
    """Whether a wheel of mmcv contains its compiled operators."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return any(re.match(r'mmcv/_ext.*\.(so|pyd)$', name) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def usable_wheel(folder):
    """The mmcv wheel of this Python in a folder, if it is there and whole."""
    pattern = MMCV.replace('-', '_').replace('==', '-') + '-cp311-*.whl'
    for wheel in sorted(glob.glob(os.path.join(folder, pattern))):
        if has_ops(wheel):
            return wheel
        say('ignoring %s: it has no compiled ops (mmcv/_ext*.so) inside' % wheel)
    return None


def wheelhouse():
    """Folder of the wheel for this mmcv, torch, Python and platform."""
    torch = answers('import torch; print(torch.__version__, torch.cuda.is_available())')
    if torch is None:
        raise SetupError(
            'torch does not import in %s; remove that folder and run the same command again.' % VENV
        )
    version, cuda = torch.split()
    device = 'cuda' if cuda == 'True' and shutil.which('nvcc') else 'cpu'
    if cuda == 'True' and device == 'cpu':
        say('a GPU, but no nvcc: building mmcv for the CPU (see "GPU machines" in README.md)')
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    key = '%s-torch%s-cp311-%s_%s-%s' % (
        MMCV.replace('==', '-'),
        version,
        sys.platform,
        platform.machine(),
        device,
    )
    return os.path.join(cache, 'fgc_mm', 'wheels', key), device


@contextlib.contextmanager
def locked(path):
    """One process at a time; the lock goes with the process that holds it."""
    import fcntl

    with open(path, 'w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say('another process is building the same wheel; waiting for it')
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_mmcv(house, device):
    """Compile mmcv against the installed torch, into the wheelhouse."""
    compiler = os.environ.get('CXX') or next(filter(shutil.which, ('c++', 'g++', 'clang++')), None)
    if not compiler or not shutil.which(compiler.split()[0]):
        raise SetupError(
            'mmcv has to be compiled and no C++ compiler was found (%s).\n'
            'Install one (`apt-get install g++`, `dnf install gcc-c++`, `xcode-select --install`)\n'
            'or name a folder with a prebuilt wheel of %s by FGC_MM_WHEELS, then run the same\n'
            'command again.' % (compiler or 'c++, g++, clang++', MMCV)
        )
    log = os.path.join(house, 'build.log')
    say('compiling mmcv once for this user: 15 to 25 minutes on 2 cores (log: %s)' % log)
    env = dict(os.environ, MMCV_WITH_OPS='1', FORCE_CUDA='1' if device == 'cuda' else '0')
    env.setdefault('MAX_JOBS', str(os.cpu_count() or 1))
    env['PATH'] = os.path.join(VENV, 'bin') + os.pathsep + env.get('PATH', '')
    if device == 'cpu':
        env['CUDA_VISIBLE_DEVICES'] = ''
    scratch = tempfile.mkdtemp(dir=house)
    cmd = [PYTHON, '-m', 'pip', 'wheel', '--verbose', '--no-deps', '--no-cache-dir']
    cmd += ['--no-build-isolation', '--wheel-dir', scratch, MMCV]
    try:
        with open(log, 'w') as file:
            code = follow_build(cmd, env, file)
        wheel = usable_wheel(scratch) if code == 0 else None
        if wheel is None:
            with open(log, errors='replace') as file:
                tail = ''.join(file.readlines()[-15:])
            raise SetupError(
                'Building mmcv failed; the end of %s:\n%s\n'
                'The compiler needs the Python headers (python3.11-dev) and about 2 GB of memory\n'
                'for each job (MAX_JOBS=1 for fewer). %s' % (log, tail, NETWORK_HINT)
            )
        final = os.path.join(house, os.path.basename(wheel))
        os.replace(wheel, final)
        return final
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def follow_build(cmd, env, log):
    """Run the build, all of it into the log and a line of progress now and then."""
    begin = shown = time.time()
    process = subprocess.Popen(
        cmd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors='replace',
    )
    for line in process.stdout:
        log.write(line)
        step = re.match(r'\s*\[(\d+)/(\d+)\]', line)
        if step and time.time() - shown > 30:
            shown = time.time()
            say(
                '  mmcv: file %s of %s, %d min'
                % (step.group(1), step.group(2), (shown - begin) / 60)
            )
    return process.wait()


def mmcv_wheel():
    """A prebuilt wheel if one is handed in, else the wheelhouse's, built if need be."""
    handed_in = os.environ.get('FGC_MM_WHEELS')
    if handed_in:
        wheel = usable_wheel(handed_in)
        if wheel is None:
            raise SetupError(
                'FGC_MM_WHEELS=%s holds no usable wheel of %s for Python 3.11.\n'
                'Put one there, or unset the variable to have it built.' % (handed_in, MMCV)
            )
        return wheel
    house, device = wheelhouse()
    os.makedirs(house, exist_ok=True)
    with locked(os.path.join(house, 'lock')):
        return usable_wheel(house) or build_mmcv(house, device)


def setup(rebuild=False):
    """Make the environment, or see that it is there."""
    stamp = None
    if os.path.exists(STAMP) and not rebuild:
        with open(STAMP) as file:
            stamp = file.read()
    if stamp == fingerprint() and answers(CHECK_OPS) is not None:
        return
    begin = time.time()
    base = find_python()
    uv = find_uv(base)
    if rebuild or answers('import sys; assert sys.version_info[:2] == (3, 11)') is None:
        say('making the environment in .venv/')
        shutil.rmtree(VENV, ignore_errors=True)
        call([uv, 'venv', '--quiet', '--python', base, VENV], 'Making .venv', NETWORK_HINT)
    install = [uv, 'pip', 'install', '--python', PYTHON, '--no-deps']
    say('installing the pinned packages (about 7 GB the first time, linked from the cache later)')
    call(install + ['-r', PINS], 'Installing the packages', NETWORK_HINT, cwd=ROOT)
    wheel = mmcv_wheel()
    call(install + ['--reinstall', wheel], 'Installing mmcv', NETWORK_HINT)
    call(
        install + ['--no-build-isolation', '-e', ROOT], 'Installing fgc_mm', NETWORK_HINT, cwd=ROOT
    )
    if answers(CHECK_OPS) is None:
        raise SetupError(
            'mmcv is installed, but its compiled ops do not work (mmcv.ops: nms, roi_align).\n'
            'Remove %s and run the same command again to build it anew.' % wheel
        )
    with open(STAMP, 'w') as file:
        file.write(fingerprint())
    say('environment ready after %d s; mmcv.ops is compiled and works' % (time.time() - begin))


def in_env(cmd, env=None):
    """Run a command inside the environment, from the project's root."""
    full = dict(os.environ, **(env or {}))
    full['PATH'] = os.path.join(VENV, 'bin') + os.pathsep + full.get('PATH', '')
    full['VIRTUAL_ENV'] = VENV
    return subprocess.call(cmd, cwd=ROOT, env=full)


def demo(work_dir):
    """Train the demo detector, test it, and say what came out."""
    code = in_env([PYTHON, 'tools/train.py', DEMO_CONFIG, '--work-dir', work_dir])
    if code:
        return code
    with open(os.path.join(ROOT, work_dir, 'last_checkpoint')) as file:
        checkpoint = file.read().strip()
    pictures = os.path.join(work_dir, 'pictures')
    results = os.path.join(work_dir, 'results.json')
    cmd = [PYTHON, 'tools/test.py', DEMO_CONFIG, checkpoint, '--work-dir', work_dir]
    code = in_env(cmd + ['--show-dir', pictures, '--out', results])
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


def test(slow, args):
    """What CI runs: lint, types, tests."""
    workers = str(min(os.cpu_count() or 1, 4))
    bin_dir = os.path.join(VENV, 'bin')
    checks = [
        [os.path.join(bin_dir, 'ruff'), 'check', '.'],
        [os.path.join(bin_dir, 'ruff'), 'format', '--check', '.'],
        [os.path.join(bin_dir, 'mypy')],
    ]
    pytest = [PYTHON, '-m', 'pytest', '-m', 'slow' if slow else 'not slow']
    if not slow:
        pytest += ['-n', workers, '--dist', 'loadfile', '--durations', '10']
    failed = [cmd for cmd in ([] if slow or args else checks) if in_env(cmd)]
    threads = {'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '2' if slow else '1')}
    if in_env(pytest + args, threads):
        failed.append(pytest)
    for cmd in failed:
        say('FAILED: ' + ' '.join(os.path.relpath(c, ROOT) if os.path.isabs(c) else c for c in cmd))
    return 1 if failed else 0


def lock():
    """Resolve tools/dev_requirements.in into exact versions for every platform."""
    uv = find_uv(find_python())
    cmd = [uv, 'pip', 'compile', 'tools/dev_requirements.in', '-o', 'tools/dev_requirements.txt']
    cmd += ['--universal', '--python-version', '3.11', '--no-header', '--no-annotate']
    call(cmd, 'Resolving the versions', NETWORK_HINT, cwd=ROOT, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    commands = parser.add_subparsers(dest='command')
    sub = commands.add_parser('demo', help='train and test the demo detector')
    sub.add_argument('--work-dir', default=os.path.join('work_dirs', 'demo'))
    sub = commands.add_parser('test', help='lint, type check and tests')
    sub.add_argument('--slow', action='store_true', help='the slow training checks instead')
    sub.add_argument('args', nargs='*', help='passed to pytest (after --)')
    sub = commands.add_parser('setup', help='only the environment')
    sub.add_argument('--rebuild', action='store_true', help='make .venv anew')
    sub = commands.add_parser('run', help='any command inside the environment')
    sub.add_argument('args', nargs=argparse.REMAINDER)
    commands.add_parser('lock', help='resolve the pinned versions anew')
    options = parser.parse_args()
    if not options.command:
        parser.error('say what to do: demo, test, setup, run or lock')
    try:
        if options.command == 'lock':
            return lock()
        setup(getattr(options, 'rebuild', False))
    except SetupError as error:
        sys.stderr.write('\n[fgc_mm] error: %s\n' % error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write('\n[fgc_mm] interrupted; the same command goes on where it stopped\n')
        return 130
    if options.command == 'demo':
        return demo(options.work_dir)
    if options.command == 'test':
        return test(options.slow, options.args)
    if options.command == 'run':
        return in_env(options.args or [PYTHON])
    return 0


if __name__ == '__main__':
    sys.exit(main())
