# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The environments of tools/dev.py: one for each line of the OpenMMLab packages.

mmcv comes as source. Its wheel is built once per user, line and torch version and
kept in ~/.cache/fgc_mm/wheels; a folder with a prebuilt one can be named by the
environment variable FGC_MM_WHEELS. Only the standard library is used here, and
only syntax that old Pythons read, so that they get a message and not a riddle.
"""

import contextlib
import glob
import hashlib
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


def has_ops(wheel):
    """Whether a wheel of mmcv contains its compiled operators."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return any(re.match(r'mmcv/_ext.*\.(so|pyd)$', name) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


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


class Line:
    """One of the two lines of OpenMMLab packages: its pins, its mmcv, its environment."""

    def __init__(self, name, mmcv, venv, pins):
        self.name = name
        self.mmcv = mmcv
        self.venv = os.path.join(ROOT, venv)
        self.python = os.path.join(self.venv, 'bin', 'python')
        self.stamp = os.path.join(self.venv, 'fgc_mm.stamp')
        self.pins = os.path.join(ROOT, 'tools', pins)

    def answers(self, code):
        """What the environment's Python prints for a line of code, or None."""
        try:
            out = subprocess.run(
                [self.python, '-c', code],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                universal_newlines=True,
            )
        except OSError:
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    def fingerprint(self):
        """What the environment was made of; another one is installed anew."""
        digest = hashlib.sha256()
        for path in (self.pins, os.path.join(ROOT, 'pyproject.toml')):
            with open(path, 'rb') as file:
                digest.update(file.read())
        digest.update((self.mmcv + ROOT).encode())
        # Another wheel handed in, or a CUDA compiler that is there now.
        digest.update(repr((os.environ.get('FGC_MM_WHEELS'), bool(shutil.which('nvcc')))).encode())
        return digest.hexdigest()

    def usable_wheel(self, folder):
        """The mmcv wheel of this Python in a folder, if it is there and whole."""
        pattern = self.mmcv.replace('-', '_').replace('==', '-') + '-cp311-*.whl'
        for wheel in sorted(glob.glob(os.path.join(folder, pattern))):
            if has_ops(wheel):
                return wheel
            say('ignoring %s: it has no compiled ops (mmcv/_ext*.so) inside' % wheel)
        return None

    def wheelhouse(self):
        """Folder of the wheel for this mmcv, torch, Python and platform."""
        torch = self.answers('import torch; print(torch.__version__, torch.cuda.is_available())')
        if torch is None:
            raise SetupError(
                'torch does not import in %s; remove that folder and run the same command again.'
                % self.venv
            )
        version, cuda = torch.split()
        device = 'cuda' if cuda == 'True' and shutil.which('nvcc') else 'cpu'
        if cuda == 'True' and device == 'cpu':
            say('a GPU, but no nvcc: building mmcv for the CPU (see "GPU machines" in README.md)')
        cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
        key = '%s-torch%s-cp311-%s_%s-%s' % (
            self.mmcv.replace('==', '-'),
            version,
            sys.platform,
            platform.machine(),
            device,
        )
        return os.path.join(cache, 'fgc_mm', 'wheels', key), device

    def build_mmcv(self, house, device):
        """Compile mmcv against the installed torch, into the wheelhouse."""
        compiler = os.environ.get('CXX') or next(
            filter(shutil.which, ('c++', 'g++', 'clang++')), None
        )
        if not compiler or not shutil.which(compiler.split()[0]):
            raise SetupError(
                'mmcv has to be compiled and no C++ compiler was found (%s).\n'
                'Install one (`apt-get install g++`, `dnf install gcc-c++`,\n'
                '`xcode-select --install`) or name a folder with a prebuilt wheel of %s by\n'
                'FGC_MM_WHEELS, then run the same command again.'
                % (compiler or 'c++, g++, clang++', self.mmcv)
            )
        log = os.path.join(house, 'build.log')
        say('compiling mmcv once for this user: 15 to 25 minutes on 2 cores (log: %s)' % log)
        env = dict(os.environ, MMCV_WITH_OPS='1', FORCE_CUDA='1' if device == 'cuda' else '0')
        env.setdefault('MAX_JOBS', str(os.cpu_count() or 1))
        env['PATH'] = os.path.join(self.venv, 'bin') + os.pathsep + env.get('PATH', '')
        if device == 'cpu':
            env['CUDA_VISIBLE_DEVICES'] = ''
        scratch = tempfile.mkdtemp(dir=house)
        cmd = [self.python, '-m', 'pip', 'wheel', '--verbose', '--no-deps', '--no-cache-dir']
        cmd += ['--no-build-isolation', '--wheel-dir', scratch, self.mmcv]
        try:
            with open(log, 'w') as file:
                code = follow_build(cmd, env, file)
            wheel = self.usable_wheel(scratch) if code == 0 else None
            if wheel is None:
                with open(log, errors='replace') as file:
                    tail = ''.join(file.readlines()[-15:])
                raise SetupError(
                    'Building mmcv failed; the end of %s:\n%s\n'
                    'The compiler needs the Python headers (python3.11-dev) and about 2 GB of\n'
                    'memory for each job (MAX_JOBS=1 for fewer). %s' % (log, tail, NETWORK_HINT)
                )
            final = os.path.join(house, os.path.basename(wheel))
            os.replace(wheel, final)
            return final
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def mmcv_wheel(self):
        """A prebuilt wheel if one is handed in, else the wheelhouse's, built if need be."""
        handed_in = os.environ.get('FGC_MM_WHEELS')
        if handed_in:
            wheel = self.usable_wheel(handed_in)
            if wheel is None:
                raise SetupError(
                    'FGC_MM_WHEELS=%s holds no usable wheel of %s for Python 3.11.\n'
                    'Put one there, or unset the variable to have it built.'
                    % (handed_in, self.mmcv)
                )
            return wheel
        house, device = self.wheelhouse()
        os.makedirs(house, exist_ok=True)
        with locked(os.path.join(house, 'lock')):
            return self.usable_wheel(house) or self.build_mmcv(house, device)

    def setup(self, rebuild=False):
        """Make the environment, or see that it is there."""
        stamp = None
        if os.path.exists(self.stamp) and not rebuild:
            with open(self.stamp) as file:
                stamp = file.read()
        if stamp == self.fingerprint() and self.answers(CHECK_OPS) is not None:
            return
        begin = time.time()
        base = find_python()
        uv = find_uv(base)
        if rebuild or self.answers('import sys; assert sys.version_info[:2] == (3, 11)') is None:
            say('making the environment in %s/' % os.path.basename(self.venv))
            shutil.rmtree(self.venv, ignore_errors=True)
            call(
                [uv, 'venv', '--quiet', '--python', base, self.venv],
                'Making the environment',
                NETWORK_HINT,
            )
        install = [uv, 'pip', 'install', '--python', self.python, '--no-deps']
        say('installing the pinned packages (about 7 GB; linked from the cache the next time)')
        # Not from here: the overrides in pyproject.toml, which `lock` heeds, would undo pins.
        away = tempfile.gettempdir()
        call(install + ['-r', self.pins], 'Installing the packages', NETWORK_HINT, cwd=away)
        wheel = self.mmcv_wheel()
        call(install + ['--reinstall', wheel], 'Installing mmcv', NETWORK_HINT)
        call(
            install + ['--no-build-isolation', '-e', ROOT],
            'Installing fgc_mm',
            NETWORK_HINT,
            cwd=ROOT,
        )
        if self.answers(CHECK_OPS) is None:
            raise SetupError(
                'mmcv is installed, but its compiled ops do not work (mmcv.ops: nms, roi_align).\n'
                'Remove %s and run the same command again to build it anew.' % wheel
            )
        with open(self.stamp, 'w') as file:
            file.write(self.fingerprint())
        say('environment ready after %d s; mmcv.ops is compiled and works' % (time.time() - begin))

    def in_env(self, cmd, env=None):
        """Run a command inside the environment, from the project's root."""
        full = dict(os.environ, **(env or {}))
        full['PATH'] = os.path.join(self.venv, 'bin') + os.pathsep + full.get('PATH', '')
        full['VIRTUAL_ENV'] = self.venv
        return subprocess.call(cmd, cwd=ROOT, env=full)


LINES = {
    line.name: line
    for line in (
        Line('maintained', 'onedl-mmcv==2.3.6', '.venv', 'dev_requirements.txt'),
        Line('original', 'mmcv==2.1.0', '.venv-original', 'dev_requirements_original.txt'),
    )
}
