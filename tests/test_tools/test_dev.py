# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The set-up, and what it says when something is in its way."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fgc_mm.versions import STACK, installed

(MMENGINE,) = (requirement for requirement in STACK if requirement.module == 'mmengine')

TOOLS = Path(__file__).parents[2] / 'tools'
WHEELS = {
    'maintained': 'onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl',
    'original': 'mmcv-2.1.0-cp311-cp311-linux_x86_64.whl',
}
OPS = 'mmcv/_ext.cpython-311-x86_64-linux-gnu.so'


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The module of the environments, with a cache of its own."""
    spec = importlib.util.spec_from_file_location('fgc_mm_dev_env', TOOLS / 'dev_env.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('FGC_MM_WHEELS', raising=False)
    return module


@pytest.fixture
def line(request, dev, tmp_path):
    """A line, with a folder of its own and the Python that runs the tests."""
    line = dev.LINES[getattr(request, 'param', 'maintained')]
    line.venv = str(tmp_path / '.venv')
    line.stamp = str(tmp_path / '.venv' / 'fgc_mm.stamp')
    line.python = sys.executable
    return line


each_line = pytest.mark.parametrize('line', sorted(WHEELS), indirect=True)


def make_wheel(path, *names):
    with zipfile.ZipFile(path, 'w') as archive:
        for name in names:
            archive.writestr(name, '')


@each_line
def test_a_wheel_without_ops_is_not_used(line, tmp_path, capsys):
    make_wheel(tmp_path / WHEELS[line.name], 'mmcv/__init__.py')
    assert line.usable_wheel(str(tmp_path)) is None
    assert 'no compiled ops' in capsys.readouterr().out


@each_line
def test_a_half_written_wheel_is_not_used(line, tmp_path):
    (tmp_path / WHEELS[line.name]).write_bytes(b'PK\x03\x04 and then the power went')
    assert line.usable_wheel(str(tmp_path)) is None


def test_a_wheel_of_the_wheelhouse_is_used_and_nothing_is_compiled(line, monkeypatch):
    house, _ = line.wheelhouse()
    os.makedirs(house)
    make_wheel(os.path.join(house, WHEELS[line.name]), OPS)
    monkeypatch.setattr(line, 'build_mmcv', lambda *a: pytest.fail('compiled again'))
    assert line.mmcv_wheel() == os.path.join(house, WHEELS[line.name])


def test_the_wheelhouse_tells_lines_and_torch_versions_apart(dev, line):
    import torch

    assert f'onedl-mmcv-2.3.6-torch{torch.__version__}-cp311' in line.wheelhouse()[0]
    other = dev.LINES['original']
    other.answers = lambda code: '2.1.2+cu121 False'
    assert f'{os.sep}mmcv-2.1.0-torch2.1.2+cu121-cp311' in other.wheelhouse()[0]


def test_the_lines_have_pins_and_folders_of_their_own(dev):
    assert len({line.venv for line in dev.LINES.values()}) == 2
    for line, mmengine in (
        ('maintained', 'onedl-mmengine==0.10.12'),
        ('original', 'mmengine==0.10.7'),
    ):
        assert mmengine in Path(dev.LINES[line].pins).read_text().splitlines()


def test_this_environment_has_the_pinned_versions(dev):
    used = 'original' if installed(MMENGINE)[0] == 'mmengine' else 'maintained'
    pins = [Requirement(pin) for pin in Path(dev.LINES[used].pins).read_text().splitlines()]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    found = {pin.name: metadata.version(pin.name) for pin in here}
    assert len(here) > 100
    assert not [f'{pin}: {found[pin.name]}' for pin in here if found[pin.name] not in pin.specifier]


@each_line
def test_a_wheel_of_the_other_line_is_not_used(dev, line, tmp_path, monkeypatch):
    (other,) = set(WHEELS) - {line.name}
    make_wheel(tmp_path / WHEELS[other], OPS)
    monkeypatch.setenv('FGC_MM_WHEELS', str(tmp_path))
    with pytest.raises(dev.SetupError, match=r'FGC_MM_WHEELS=.* holds no usable wheel'):
        line.mmcv_wheel()


def test_no_compiler(dev, line, tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(
        dev.SetupError, match=r'no C\+\+ compiler was found(.|\n)*apt-get install g'
    ):
        line.build_mmcv(str(tmp_path), 'cpu')


def test_a_failing_build_shows_the_end_of_its_log_and_leaves_no_wheel(dev, line, tmp_path):
    fake = tmp_path / 'python'
    fake.write_text('#!/bin/sh\necho "error: no space left on device"; exit 1\n')
    fake.chmod(0o755)
    line.python = str(fake)
    with pytest.raises(dev.SetupError, match='no space left on device'):
        line.build_mmcv(str(tmp_path), 'cpu')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['build.log', 'python']


def test_wrong_python(dev, tmp_path, monkeypatch):
    monkeypatch.setattr(dev.sys, 'version_info', (3, 9, 1))
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(dev.SetupError, match=r'needs Python 3\.11(.|\n)*python3\.11 tools/dev.py'):
        dev.find_python()


def test_no_network(dev, tmp_path, monkeypatch):
    monkeypatch.setattr(dev, 'ROOT', str(tmp_path))
    monkeypatch.setenv('PATH', '/nonexistent')
    for name in ('PIP_FIND_LINKS', 'PIP_EXTRA_INDEX_URL'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
    monkeypatch.setenv('PIP_RETRIES', '0')
    with pytest.raises(
        dev.SetupError, match=r'Installing uv with pip failed(.|\n)*check the network'
    ):
        dev.find_uv(sys.executable)


def test_mmcv_without_ops_is_noticed_after_installing(dev, line, monkeypatch):
    monkeypatch.setattr(dev, 'call', lambda *a, **k: None)
    monkeypatch.setattr(line, 'mmcv_wheel', lambda: 'the.whl')
    monkeypatch.setattr(dev, 'CHECK_OPS', 'raise ImportError("no _ext")')
    os.makedirs(line.venv)
    with pytest.raises(dev.SetupError, match=r'compiled ops do not work(.|\n)*Remove the\.whl'):
        line.setup()
    assert not os.path.exists(line.stamp)


def test_the_compiled_ops_of_this_environment_work(dev, line):
    assert line.answers(dev.CHECK_OPS) is not None


def test_without_a_command_it_says_what_there_is():
    out = subprocess.run([sys.executable, TOOLS / 'dev.py'], capture_output=True, text=True)
    assert out.returncode == 2
    assert 'demo, test, setup' in out.stderr
