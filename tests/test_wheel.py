# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The wheel, in an environment that has the stack and nothing of the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

PROJECT = Path(__file__).parents[1]
# `where` ends up in the copy of the config in the work dir.
CONFIG = """
_base_ = 'fgc_mm::demo/{name}.py'
where = __import__('fgc_mm').__file__
demo_data = dict(root={root!r})
data_root = {root!r} + '/{folder}/'
train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root, indices=4))
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=1))
val_cfg, val_dataloader, val_evaluator = None, None, None
"""


def run(*cmd, **kwargs):
    done = subprocess.run([str(c) for c in cmd], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Built as `uv build` does: the archive of the sources first, the wheel from that."""
    folder = tmp_path_factory.mktemp('dist')
    build = (sys.executable, '-m', 'hatchling', 'build', '-d', folder)
    run(*build, '-t', 'sdist', cwd=PROJECT)
    (archive,) = folder.glob('*.tar.gz')
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter='data')
    run(*build, '-t', 'wheel', cwd=folder / archive.name.removesuffix('.tar.gz'))
    (wheel,) = folder.glob('*.whl')
    return wheel


@pytest.fixture(scope='module')
def outside(wheel, tmp_path_factory):
    """A folder elsewhere, and a Python there that has the wheel installed."""
    folder = tmp_path_factory.mktemp('outside')
    run(sys.executable, '-m', 'venv', '--without-pip', folder / 'venv')
    python = folder / 'venv' / 'bin' / 'python'
    pip = (sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet')
    run(*pip, '--no-deps', '--no-index', wheel)
    (packages,) = (folder / 'venv').glob('lib/*/site-packages')
    # The stack; the .pth file in there that leads to the repository is not read.
    (packages / 'stack.pth').write_text(sysconfig.get_path('purelib'))
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    return SimpleNamespace(
        folder=folder,
        packages=packages,
        run=lambda command, *args: run(python.with_name(command), *args, cwd=folder, env=env),
    )


def test_configs_and_tools_are_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ('configs', 'tools'):
        for path in (PROJECT / folder).rglob('*.*'):
            inside = f'fgc_mm/.mim/{path.relative_to(PROJECT).as_posix()}'
            assert inside in names or '__pycache__' in inside
    assert 'fgc_mm/.mim/model-index.yml' in names


@pytest.mark.parametrize(
    ('tool', 'name', 'folder'),
    [
        ('train', 'resnet18_digits_gated', 'classification'),
        pytest.param(
            'mmdet/.mim/tools/train.py',
            'faster_rcnn_r18_digits_gated',
            'detection/VOCdevkit',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_config_on_top_of_ours_trains(tool, name, folder, outside, demo_root):
    """By the command that is installed, and by mmdet's tool as it came."""
    start = ['fgc']
    if tool.endswith('.py'):
        start, tool = ['python', '-m', 'fgc_mm'], Path(sysconfig.get_path('purelib'), tool)
    config = outside.folder / f'my_{folder[:3]}.py'
    config.write_text(CONFIG.format(name=name, folder=folder, root=str(demo_root)))
    outside.run(*start, tool, config)
    work_dir = outside.folder / 'work_dirs' / config.stem
    assert (work_dir / 'epoch_1.pth').is_file()
    copy = (work_dir / config.name).read_text()
    assert str(outside.packages) in copy
    assert str(PROJECT) not in copy
