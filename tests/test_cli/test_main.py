# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The command before it runs: help, versions, unknown names, completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fgc_mm import __version__
from fgc_mm.cli import demo_data, export
from fgc_mm.cli.main import COMMANDS, build_parser, command
from fgc_mm.datasets import DEMO_KINDS
from fgc_mm.inference import export_formats, export_parts

PROJECT = Path(__file__).parents[2]


def python(*args, **env):
    path = os.pathsep.join([str(PROJECT), os.environ.get('PYTHONPATH', '')])
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env={**os.environ, 'PYTHONPATH': path, **env},
        capture_output=True,
        text=True,
    )


def fgc(*args, **env):
    return python('-m', 'fgc_mm', *args, **env)


@pytest.mark.parametrize(
    'start', [('-m', 'fgc_mm'), ('-m', 'fgc_mm', 'train'), (PROJECT / 'tools' / 'train.py',)]
)
def test_help_imports_nothing_that_takes_long(start):
    done = python('-X', 'importtime', *start, '--help')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('usage: fgc')
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'argparse' in imported
    assert not imported & {'torch', 'numpy', 'mmengine', 'mmcv', 'matplotlib'}


@pytest.mark.parametrize('name', COMMANDS)
def test_help_says_first_what_a_command_does(name, capsys):
    first = (command(name).__doc__ or '').split('\n')[0]
    assert first.endswith('.') and len(first) < 100
    listed = ' '.join(build_parser().format_help().split())
    assert f'{name} {first[0].lower()}{first[1:-1]}' in listed
    with pytest.raises(SystemExit):
        build_parser().parse_args([name, '--help'])
    assert capsys.readouterr().out.split('\n\n')[1].startswith(first)


def test_every_script_of_tools_is_the_door_of_a_command():
    doors = [path for path in (PROJECT / 'tools').glob('*.py') if not path.stem.startswith('dev')]
    names = set()
    for path in doors:
        _, imported, empty, call = path.read_text().splitlines()
        assert (imported, empty) == ('from fgc_mm.cli.main import run_tool', '')
        names.add(call.removeprefix("run_tool('").removesuffix("')"))
    assert names == set(COMMANDS)


def test_the_version_is_told():
    assert fgc('--version').stdout == f'fgc_mm {__version__}\n'


def test_an_unknown_command_is_answered_with_those_there_are():
    done = fgc('trian', 'config.py')
    assert done.returncode == 2
    assert "there is no command 'trian', did you mean 'train'?" in done.stderr
    assert ', '.join(COMMANDS) in done.stderr
    assert 'did you mean' not in fgc('nothing-like-it').stderr


@pytest.mark.parametrize(
    ('line', 'found'),
    [
        ('fgc ', {*COMMANDS, '--version', '--help', '-h'}),
        ('fgc tr', {'train '}),
        ('fgc train --res', {'--resume '}),
        ('fgc export --format t', {'torchscript', 'torch_export'}),
    ],
)
def test_a_shell_completes(line, found, tmp_path):
    told = tmp_path / 'told'
    env = dict(_ARGCOMPLETE='1', _ARGCOMPLETE_IFS='\n', _ARGCOMPLETE_STDOUT_FILENAME=str(told))
    done = fgc(COMP_LINE=line, COMP_POINT=str(len(line)), **env)
    assert done.returncode == 0, done.stderr
    assert set(told.read_text().split('\n')) == found


def test_choices_are_those_of_the_library():
    """Which is not imported for help."""
    assert tuple(export_formats.FORMATS) == export.FORMATS
    assert export.PARTS == export_parts.PARTS
    assert demo_data.KINDS == DEMO_KINDS
