# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Ablations: the same training with other settings of its hooks, several seeds each."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hook_fields import Fields, fields_of, hook_name, set_fields
from mmengine.config import Config
from runs import Run

from fgc_mm.errors import UsageError


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


def curves(key: str, values: Sequence[float], ways: Sequence[bool] = (True, False)) -> list[Point]:
    """A setting of the cost over values, as curves with and without coupling.

    Args:
        key (str): Hook and field, such as ``'BudgetHook.target'``.
        values (Sequence[float]): Its values.
        ways (Sequence[bool]): Whether there is coupling on each curve; none for
            one curve of a config that has no ``FGCHook``. Defaults to both.
    """
    name = key.rpartition('.')[2]
    points = [] if ways else _each(key, values)
    for coupled in ways:
        for value in values:
            label = f'{name}={value}' + ('' if coupled else ', without FGC')
            fields = {key: value, **({} if coupled else WITHOUT_FGC)}
            points.append(Point(label, fields, 'with FGC' if coupled else 'without FGC'))
    return points


WITHOUT_FGC = {'FGCHook.eta': 0}
_ETAS = (0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.01, 0.02)
_RHOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

ABLATIONS: dict[str, list[Point]] = {
    'k': _each('FGCHook.k', (5, 20, 100, 200, 512, 1024, 2048, 4096)),
    'eta': _each('FGCHook.eta', _ETAS),
    'layers': [
        Point('without FGC', WITHOUT_FGC),
        # Of the nine blocks of a ResNet-20.
        Point('blocks 1-9', {'FGCHook.layers': 'all'}),
        Point('blocks 4-9', {'FGCHook.layers': [3, 4, 5, 6, 7, 8]}),
        Point('blocks 7-9', {'FGCHook.layers': [6, 7, 8]}),
        Point('blocks 8-9', {'FGCHook.layers': [7, 8]}),
        Point('block 9', {'FGCHook.layers': [8]}),
    ],
    'source': [
        Point('without FGC', WITHOUT_FGC),
        Point('label', {'FGCHook.source': 'label', 'FGCHook.shared': False}),
        Point('gate', {'FGCHook.source': 'gate', 'FGCHook.shared': False}),
        Point('feature, shared', {'FGCHook.source': 'feature', 'FGCHook.shared': True}),
        Point('feature', {'FGCHook.source': 'feature', 'FGCHook.shared': False}),
    ],
    'shared': _each('FGCHook.shared', (False, True)),
    'rho': curves('L0Hook.rho', _RHOS),
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
        UsageError: If a key has no value or fits no hook.
    """
    axes = []
    for key, *values in settings:
        if not values:
            raise UsageError(f'--set {key} has no values; write --set {key} VALUE [VALUE ...]')
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
    owners = [hook_name(hook) for hook in hooks if key in fields_of(hook)]
    if len(owners) != 1:
        what = f'several hooks have it ({", ".join(owners)})' if owners else 'no hook has it'
        names = ', '.join(map(hook_name, hooks)) or 'none'
        raise UsageError(
            f'--set {key}: {what}; write --set HOOK.{key} with a hook of custom_hooks: {names}'
        )
    return owners[0]


def slug(label: str) -> str:
    """A label as the name of a folder or file."""
    return re.sub(r'[^\w.=+-]+', '_', label).strip('_')


def make_runs(
    config: str | Path,
    points: Sequence[Point],
    seeds: Sequence[int],
    work_dir: str | Path,
    options: Sequence[str] = (),
    tools: str | Path = 'tools',
    flags: Sequence[str] = (),
) -> list[Run]:
    """The runs of a sweep: every point with every seed.

    Args:
        config (str | Path): The base config.
        points (Sequence[Point]): The settings.
        seeds (Sequence[int]): Seeds of each.
        work_dir (str | Path): Folder of all runs.
        options (Sequence[str]): ``--cfg-options`` of every run, as text.
            Defaults to none.
        tools (str | Path): Folder with ``train.py`` and ``test.py``.
        flags (Sequence[str]): Further options of both. Defaults to none.

    Raises:
        UsageError: If the config has not the hooks the points are about.
    """
    hooks = Config.fromfile(str(config)).to_dict().get('custom_hooks') or []
    runs = []
    for point in points:
        folder = Path(work_dir) / slug(point.label)
        for seed in seeds:
            run = Run(
                base=Path(config),
                folder=folder / f'seed{seed}',
                config=folder / 'config.py',
                tools=Path(tools),
                seed=seed,
                hooks=set_fields(hooks, point.fields),
                options=tuple(options),
                label=point.label,
                series=point.series,
                flags=tuple(flags),
            )
            runs.append(run)
    return runs
