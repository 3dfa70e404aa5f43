# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Ablations: the same training with other settings of its hooks, several seeds each.

A point of a sweep is a set of hook fields, and has a config that inherits the
base config. A run is a point with a seed, has a folder of its own, and is done
once its ``figures.json`` is there.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import json
import os
import pprint
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config
from mmengine.registry import HOOKS

Fields = dict[str, Any]
"""``'FGCHook.k'`` -> value."""


@dataclass(frozen=True)
class Point:
    """One setting of a sweep.

    Attributes:
        label (str): What it is called in the table.
        fields (dict): Hook and field -> value.
        series (str): Points with the same one are joined by a line.
            Defaults to ''.
    """

    label: str
    fields: Fields = field(hash=False)
    series: str = ''


def _each(key: str, values: Sequence[Any]) -> list[Point]:
    return [Point(f'{key.rpartition(".")[2]}={value}', {key: value}) for value in values]


_ETAS = (0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.01, 0.02)
_RHOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
_WITHOUT = {'FGCHook.eta': 0}

ABLATIONS: dict[str, list[Point]] = {
    'k': _each('FGCHook.k', (5, 20, 100, 200, 512, 1024, 2048, 4096)),
    'eta': _each('FGCHook.eta', _ETAS),
    'layers': [
        Point('without FGC', _WITHOUT),
        # Of the nine blocks of a ResNet-20.
        Point('blocks 1-9', {'FGCHook.layers': 'all'}),
        Point('blocks 4-9', {'FGCHook.layers': [3, 4, 5, 6, 7, 8]}),
        Point('blocks 7-9', {'FGCHook.layers': [6, 7, 8]}),
        Point('blocks 8-9', {'FGCHook.layers': [7, 8]}),
        Point('block 9', {'FGCHook.layers': [8]}),
    ],
    'source': [
        Point('without FGC', _WITHOUT),
        Point('label', {'FGCHook.source': 'label', 'FGCHook.shared': False}),
        Point('gate', {'FGCHook.source': 'gate', 'FGCHook.shared': False}),
        Point('feature, shared', {'FGCHook.source': 'feature', 'FGCHook.shared': True}),
        Point('feature', {'FGCHook.source': 'feature', 'FGCHook.shared': False}),
    ],
    'shared': _each('FGCHook.shared', (False, True)),
    'rho': [
        *(Point(f'rho={rho}', {'L0Hook.rho': rho}, 'with FGC') for rho in _RHOS),
        *(
            Point(f'rho={rho}, without FGC', {'L0Hook.rho': rho, **_WITHOUT}, 'without FGC')
            for rho in _RHOS
        ),
    ],
}
"""The ablations of the paper, its values: Tables 1 to 4 and the figure of trade-offs."""


def grid(settings: Sequence[Sequence[str]], hooks: Sequence[Mapping]) -> list[Point]:
    """All combinations of values given on the command line.

    Args:
        settings (Sequence[Sequence[str]]): Each a key and its values, as in
            ``['FGCHook.k', '5', '20']``. The hook may be left out where only one
            hook of the config has such a field.
        hooks (Sequence[Mapping]): ``custom_hooks`` of the config.

    Raises:
        ValueError: If a key has no value or fits no hook.
    """
    axes = []
    for key, *values in settings:
        if not values:
            raise ValueError(f'--set {key} has no values; write --set {key} VALUE [VALUE ...]')
        name = key if '.' in key else f'{_owner(key, hooks)}.{key}'
        axes.append([(name, _parse(value)) for value in values])
    points = []
    for chosen in itertools.product(*axes):
        label = ', '.join(f'{name.rpartition(".")[2]}={value}' for name, value in chosen)
        points.append(Point(label, dict(chosen)))
    return points


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _owner(key: str, hooks: Sequence[Mapping]) -> str:
    owners = [_name(hook) for hook in hooks if key in _fields_of(hook)]
    if len(owners) != 1:
        what = f'several hooks have it ({", ".join(owners)})' if owners else 'no hook has it'
        names = ', '.join(map(_name, hooks)) or 'none'
        raise ValueError(
            f'--set {key}: {what}; write --set HOOK.{key} with a hook of custom_hooks: {names}'
        )
    return owners[0]


def _name(hook: Mapping) -> str:
    kind = hook.get('type')
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')


def _fields_of(hook: Mapping) -> list[str]:
    """Arguments of a hook's constructor; of an unknown hook what the config has."""
    cls = HOOKS.get(_name(hook))
    if cls is None:
        return [key for key in hook if key != 'type']
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]


def set_fields(hooks: Sequence[Mapping], fields: Fields) -> list[dict]:
    """A list of hooks with some of their fields set.

    A number for a field that holds a schedule replaces the schedule's value, and
    its ramp stays.

    Args:
        hooks (Sequence[Mapping]): ``custom_hooks`` of a config; left as it is.
        fields (dict): Hook and field -> value.

    Raises:
        ValueError: If there is no such hook, more than one, or no such field.
    """
    changed = [dict(copy.deepcopy(hook)) for hook in hooks]
    for key, value in fields.items():
        owner, _, name = key.rpartition('.')
        found = [hook for hook in changed if _name(hook) == owner]
        if len(found) != 1:
            there = ', '.join(map(_name, changed)) or 'nothing'
            raise ValueError(
                f'{key}: custom_hooks of the config must have one {owner}, it has {len(found)} '
                f'(there is {there}); take a config with it, say one named *_fgc_*'
            )
        (hook,) = found
        if name not in _fields_of(hook):
            raise ValueError(
                f'{key}: {owner} has no field {name!r}; it has {", ".join(_fields_of(hook))}'
            )
        old = hook.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and isinstance(old, Mapping) and 'value' in old:
            hook[name] = {**old, 'value': value}
        else:
            hook[name] = value
    return changed


@dataclass(frozen=True)
class Run:
    """A point of a sweep with a seed, in a folder of its own."""

    point: Point
    seed: int
    folder: Path

    @property
    def config(self) -> Path:
        # Not in the run's own folder: the Runner writes its config there, under the same name.
        return self.folder.parent / 'config.py'

    @property
    def figures(self) -> Path:
        return self.folder / 'figures.json'

    def checkpoint(self) -> Optional[Path]:
        """The latest checkpoint of its training, None before there is one."""
        last = self.folder / 'last_checkpoint'
        if not last.is_file():
            return None
        path = self.folder / os.path.basename(last.read_text().strip())
        return path if path.is_file() else None


class Sweep:
    """The runs of a sweep, and how they are started.

    Args:
        config (str | Path): The base config.
        points (Sequence[Point]): The settings.
        seeds (Sequence[int]): Seeds of each.
        work_dir (str | Path): Folder of all runs.
        options (Sequence[str]): ``--cfg-options`` of every run, as text.
            Defaults to none.
        tools (str | Path): Folder with ``train.py`` and ``test.py``.

    Raises:
        ValueError: If the config has not the hooks the points are about.
    """

    def __init__(
        self,
        config: str | Path,
        points: Sequence[Point],
        seeds: Sequence[int],
        work_dir: str | Path,
        options: Sequence[str] = (),
        tools: str | Path = 'tools',
    ) -> None:
        self.base = Path(config).resolve()
        self.options = list(options)
        self.tools = Path(tools)
        self.points = list(points)
        self.hooks = {point.label: set_fields(_hooks(config), point.fields) for point in points}
        self.runs = [
            Run(point, seed, Path(work_dir) / _folder(point.label) / f'seed{seed}')
            for point in points
            for seed in seeds
        ]

    def prepare(self, run: Run) -> None:
        """Write the config of a run.

        Raises:
            ValueError: If the folder holds a run with other settings.
        """
        text = _config_text(self.base, self.hooks[run.point.label])
        record = json.dumps(dict(options=self.options, seed=run.seed))
        for path, content in ((run.config, text), (run.folder / 'run.json', record)):
            if path.exists() and path.read_text() != content:
                raise ValueError(
                    f'{run.folder} holds a run with other settings (see {path}); choose another '
                    '--work-dir, or remove that folder to train it again'
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def train_command(self, run: Run) -> list[str]:
        """The command that trains a run, or goes on with it."""
        resume = ['--resume'] if run.checkpoint() is not None else []
        return [*self._command('train', run), *resume, *self._options(run)]

    def test_command(self, run: Run) -> list[str]:
        """The command that tests a run; its checkpoint's name is known after training."""
        checkpoint = run.checkpoint() or f'<checkpoint named in {run.folder / "last_checkpoint"}>'
        command = self._command('test', run)
        command.insert(3, str(checkpoint))
        return [*command, '--out', str(run.figures), *self._options(run)]

    def _command(self, tool: str, run: Run) -> list[str]:
        script = str(self.tools / f'{tool}.py')
        return [sys.executable, script, str(run.config), '--work-dir', str(run.folder)]

    def _options(self, run: Run) -> list[str]:
        return ['--cfg-options', f'randomness.seed={run.seed}', *self.options]

    def execute(self, run: Run) -> bool:
        """Train and test a run unless it is done.

        Returns:
            bool: Whether its figures are there.
        """
        self.prepare(run)
        if run.figures.is_file():
            return True
        for tool in ('train', 'test'):
            command = self.train_command(run) if tool == 'train' else self.test_command(run)
            log = run.folder / f'{tool}.log'
            with open(log, 'w') as file:
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
            if code or (tool == 'train' and run.checkpoint() is None):
                end = '\n'.join(log.read_text(errors='replace').splitlines()[-5:])
                print(f'{shlex.join(command)}\nfailed with code {code}, see {log}:\n{end}')
                return False
        return run.figures.is_file()


def _hooks(config: str | Path) -> list[dict]:
    return Config.fromfile(str(config)).to_dict().get('custom_hooks') or []


def _config_text(base: Path, hooks: Sequence[Mapping]) -> str:
    # A list is not merged with that of the base, so it is here as a whole.
    return f'_base_ = {str(base)!r}\ncustom_hooks = {pprint.pformat(list(hooks), width=96)}\n'


def _folder(label: str) -> str:
    return re.sub(r'[^\w.=+-]+', '_', label).strip('_')
