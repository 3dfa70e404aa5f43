# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The set-up, and what it says when something is in its way."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / 'tools' / 'dev.py'
WHEEL = 'onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl'


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The module, with a project folder of its own."""
    spec = importlib.util.spec_from_file_location('fgc_mm_dev', DEV)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'VENV', str(tmp_path / '.venv'))
    monkeypatch.setattr(module, 'STAMP', str(tmp_path / '.venv' / 'fgc_mm.stamp'))
    monkeypatch.setattr(module, 'PYTHON', sys.executable)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('FGC_MM_WHEELS', raising=False)
    return module


def make_wheel(path, *names):
    with zipfile.ZipFile(path, 'w') as archive:
        for name in names:
            archive.writestr(name, '')


def test_a_wheel_without_ops_is_not_used(dev, tmp_path, capsys):
    make_wheel(tmp_path / WHEEL, 'mmcv/__init__.py')
    assert dev.usable_wheel(str(tmp_path)) is None
    assert 'no compiled ops' in capsys.readouterr().out


def test_a_half_written_wheel_is_not_used(dev, tmp_path):
    (tmp_path / WHEEL).write_bytes(b'PK\x03\x04 and then the power went')
    assert dev.usable_wheel(str(tmp_path)) is None


def test_a_wheel_of_the_wheelhouse_is_used_and_nothing_is_compiled(dev, monkeypatch):
    house, _ = dev.wheelhouse()
    os.makedirs(house)
    make_wheel(os.path.join(house, WHEEL), 'mmcv/_ext.cpython-311-x86_64-linux-gnu.so')
    monkeypatch.setattr(dev, 'build_mmcv', lambda *a: pytest.fail('compiled again'))
    assert dev.mmcv_wheel() == os.path.join(house, WHEEL)


def test_the_wheelhouse_tells_torch_versions_apart(dev):
    import torch

    assert f'torch{torch.__version__}-cp311' in dev.wheelhouse()[0]


def test_a_handed_in_folder_without_the_wheel_is_named(dev, tmp_path, monkeypatch):
    monkeypatch.setenv('FGC_MM_WHEELS', str(tmp_path))
    with pytest.raises(dev.SetupError, match=r'FGC_MM_WHEELS=.* holds no usable wheel'):
        dev.mmcv_wheel()


def test_no_compiler(dev, tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(
        dev.SetupError, match=r'no C\+\+ compiler was found(.|\n)*apt-get install g'
    ):
        dev.build_mmcv(str(tmp_path), 'cpu')


def test_a_failing_build_shows_the_end_of_its_log_and_leaves_no_wheel(dev, tmp_path, monkeypatch):
    fake = tmp_path / 'python'
    fake.write_text('#!/bin/sh\necho "error: no space left on device"; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(dev, 'PYTHON', str(fake))
    with pytest.raises(dev.SetupError, match='no space left on device'):
        dev.build_mmcv(str(tmp_path), 'cpu')
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


def test_mmcv_without_ops_is_noticed_after_installing(dev, tmp_path, monkeypatch):
    monkeypatch.setattr(dev, 'call', lambda *a, **k: None)
    monkeypatch.setattr(dev, 'mmcv_wheel', lambda: 'the.whl')
    monkeypatch.setattr(dev, 'CHECK_OPS', 'raise ImportError("no _ext")')
    os.makedirs(dev.VENV)
    with pytest.raises(dev.SetupError, match=r'compiled ops do not work(.|\n)*Remove the\.whl'):
        dev.setup()
    assert not os.path.exists(dev.STAMP)


def test_the_compiled_ops_of_this_environment_work(dev):
    assert dev.answers(dev.CHECK_OPS) is not None


def test_without_a_command_it_says_what_there_is():
    out = subprocess.run([sys.executable, DEV], capture_output=True, text=True)
    assert out.returncode == 2
    assert 'demo, test, setup' in out.stderr
