# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Trainings and their tests, each in a folder of its own and done once."""

from __future__ import annotations

import argparse
import json
import os
import pprint
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fgc_mm.analysis.tradeoff import read_figures
from fgc_mm.errors import UsageError
from fgc_mm.files import write_files
from fgc_mm.runtime.untrusted.loading import FLAG


@dataclass(frozen=True)
class Run:
    """One training and its test by ``tools/train.py`` and ``tools/test.py``.

    It is done once its ``figures.json`` is there, and goes on from its last
    checkpoint if it was stopped.

    Args:
        base (Path): The config it inherits.
        folder (Path): Its work dir.
        config (Path): Where its own config is written. Not into the folder: the
            Runner writes one there, under the same name.
        tools (Path): Folder with ``train.py`` and ``test.py``.
        seed (int): Defaults to 0.
        hooks (Sequence[Mapping], optional): ``custom_hooks`` in place of those
            of the base. Defaults to None.
        options (Sequence[str]): Further ``--cfg-options``, as text.
            Defaults to none.
        label (str): What it is called in tables; the same for all seeds.
            Defaults to ''.
        series (str): Points with the same one are joined by a line.
            Defaults to ''.
        flags (Sequence[str]): Further options of both tools. Defaults to none.
    """

    base: Path
    folder: Path
    config: Path
    tools: Path
    seed: int = 0
    hooks: Optional[Sequence[Mapping]] = None
    options: Sequence[str] = ()
    label: str = ''
    series: str = ''
    flags: Sequence[str] = ()

    @property
    def figures(self) -> Path:
        """Where its figures are once it is done."""
        return self.folder / 'figures.json'

    def checkpoint(self) -> Optional[Path]:
        """The latest checkpoint of its training, None before there is one."""
        last = self.folder / 'last_checkpoint'
        if not last.is_file():
            return None
        path = self.folder / os.path.basename(last.read_text().strip())
        return path if path.is_file() else None

    def metrics(self) -> dict[str, Any]:
        """The figures of its test."""
        (metrics,) = read_figures(self.figures)
        return metrics

    def prepare(self) -> None:
        """Write its config.

        Raises:
            UsageError: If the folder holds a run with other settings.
        """
        record = json.dumps(dict(options=list(self.options), seed=self.seed))
        for path, content in ((self.config, self._text()), (self.folder / 'run.json', record)):
            if not path.exists():
                write_files({path: content})
            elif path.read_text() != content:
                raise UsageError(
                    f'{self.folder} holds a run with other settings (see {path}); choose another '
                    '--work-dir, or remove that folder to train it again'
                )

    def _text(self) -> str:
        text = f'_base_ = {str(self.base.resolve())!r}\n'
        if self.hooks is not None:
            # A list is not merged with that of the base, so it is here as a whole.
            text += f'custom_hooks = {pprint.pformat(list(self.hooks), width=96)}\n'
        return text

    def train_command(self) -> list[str]:
        """The command that trains it, or goes on with it."""
        resume = ['--resume'] if self.checkpoint() is not None else []
        return [*self._command('train'), *resume, *self._options()]

    def test_command(self) -> list[str]:
        """The command that tests it; its checkpoint's name is known after training."""
        checkpoint = self.checkpoint() or f'<checkpoint named in {self.folder / "last_checkpoint"}>'
        command = self._command('test')
        command.insert(3, str(checkpoint))
        return [*command, '--out', str(self.figures), *self._options()]

    def _command(self, tool: str) -> list[str]:
        script = str(self.tools / f'{tool}.py')
        command = [sys.executable, script, str(self.config), '--work-dir', str(self.folder)]
        return [*command, *self.flags]

    def _options(self) -> list[str]:
        return ['--cfg-options', f'randomness.seed={self.seed}', *self.options]

    def train(self) -> bool:
        """Train it, or go on with it.

        Returns:
            bool: Whether it has a checkpoint and nothing failed.
        """
        self.prepare()
        return self._call('train', self.train_command()) and self.checkpoint() is not None

    def execute(self) -> bool:
        """Train and test it unless that is done.

        Returns:
            bool: Whether its figures are there.
        """
        self.prepare()
        if not self.figures.is_file() and self.train():
            self._call('test', self.test_command())
        return self.figures.is_file()

    def _call(self, tool: str, command: list[str]) -> bool:
        log = self.folder / f'{tool}.log'
        with open(log, 'w') as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        if code:
            end = '\n'.join(log.read_text(errors='replace').splitlines()[-5:])
            print(f'{shlex.join(command)}\nfailed with code {code}, see {log}:\n{end}', flush=True)
        return code == 0


def add_run_arguments(parser: argparse.ArgumentParser, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """The options of every tool that makes runs.

    Args:
        parser (ArgumentParser): The tool's.
        seeds (Sequence[int]): Defaults to 0, 1 and 2.
    """
    shown = ' '.join(map(str, seeds))
    parser.add_argument(
        '--seeds', type=int, nargs='+', default=list(seeds), help=f'{shown} by default'
    )
    parser.add_argument('--work-dir', help='folder of all runs')
    parser.add_argument('--metric', help="as in figures.json; the task's by default")
    parser.add_argument('--dry-run', action='store_true', help='print the commands only')
    parser.add_argument('--report', action='store_true', help='table and plot of what is done')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        type=_pair,
        default=[],
        help='settings of every run, as key=value',
    )
    parser.add_argument(
        FLAG,
        dest='flags',
        action='append_const',
        const=FLAG,
        default=[],
        help='let every run load checkpoints as they are, even if that runs code in them',
    )


def _pair(text: str) -> str:
    if not text.partition('=')[1]:
        raise argparse.ArgumentTypeError(f'{text}: write KEY=VALUE, as in train_cfg.max_epochs=10')
    return text


def execute_all(runs: Sequence[Run]) -> int:
    """Execute runs one after the other.

    Returns:
        int: How many failed.
    """
    failed = 0
    for number, run in enumerate(runs, 1):
        print(f'[{number}/{len(runs)}] {run.label}, seed {run.seed}', flush=True)
        failed += not run.execute()
    return failed


def print_commands(runs: Sequence[Run]) -> None:
    """What :func:`execute_all` would do."""
    for run in runs:
        done = run.figures.is_file()
        print(f'# {run.label}, seed {run.seed}' + (': done' if done else ''))
        if not done:
            print(shlex.join(run.train_command()))
            print(shlex.join(run.test_command()))
