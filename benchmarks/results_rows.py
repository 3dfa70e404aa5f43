# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The rows of the table that benchmarks/results.py makes, and the runs behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fgc_mm.analysis import Run
from fgc_mm.analysis.sweep import Point, make_runs
from fgc_mm.analysis.variants import Fields
from fgc_mm.gates.utils import Layers

PROJECT = Path(__file__).parents[1]
TOOLS = PROJECT / 'tools'
GATED, FGC = 'gated', 'fgc'
WITHOUT, WITH = 'without FGC', 'with FGC'


@dataclass(frozen=True)
class Way:
    """A row: how a network is fine-tuned.

    Attributes:
        label (str): What the table calls it.
        stage (str): Which config of the task.
        fields (dict): What is set in its hooks. Defaults to nothing.
        series (str): Its curve in the trade-off plot. Defaults to none.
    """

    label: str
    stage: str
    fields: Fields = field(default_factory=dict, hash=False)
    series: str = ''


WAYS = {
    'dense': Way('dense', 'baseline'),
    'gated': Way('gated, without FGC', GATED, series=WITHOUT),
    'fgc': Way('FGC, mean_log', FGC, series=WITH),
    'log_sum': Way('FGC, log_sum', FGC, {'FGCHook.form': 'log_sum'}),
    'bas': Way('BAS', 'bas'),
    'fbs': Way('FBS', 'fbs'),
    'label': Way('FGC, neighbours by label', FGC, {'FGCHook.source': 'label'}),
    'gate': Way('FGC, neighbours by gate', FGC, {'FGCHook.source': 'gate'}),
}
MAIN = ('dense', 'gated', 'fgc')


@dataclass(frozen=True)
class Task:
    """A protocol.

    Attributes:
        config (str): Name of its configs with ``{}`` for the stage.
        metric (str): As in ``figures.json``.
        layers (str | list[int]): Blocks whose gates are looked at in every row.
        start (str): What all rows start from: a file of public weights, or the
            config whose training makes it.
        neighbours (int): k of the overlap. Defaults to 10.
        rows (tuple[str, ...]): Keys of :data:`WAYS`. Defaults to the main ones.
        etas (dict): Form -> weights that are tried. Defaults to none.
        targets (tuple[float, ...]): Costs of the trade-off beside the config's
            own. Defaults to none.
    """

    config: str
    metric: str
    layers: Layers
    start: str
    neighbours: int = 10
    rows: tuple[str, ...] = MAIN
    etas: dict[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    targets: tuple[float, ...] = ()

    def path(self, stage: str) -> Path:
        """The config of a stage."""
        return PROJECT / 'configs/short' / f'{self.config.format(stage)}.py'


def _cifar(depth: int, weights: str, blocks: int, **more) -> Task:
    layers = list(range(-blocks, 0))
    return Task(f'resnet{depth}_{{}}_tuned_cifar10', 'error/top1', layers, weights, **more)


TASKS = {
    'resnet20': _cifar(
        20,
        'resnet20-12fca82f.th',
        2,
        rows=tuple(WAYS),
        etas={'mean_log': (0.003, 0.03, 0.1), 'log_sum': (0.003, 0.03, 0.1)},
        targets=(0.3, 0.6),
    ),
    'resnet32': _cifar(32, 'resnet32-d509ac18.th', 2),
    'resnet56': _cifar(56, 'resnet56-4bfd9763.th', 4),
    'detection': Task(
        'faster_rcnn_r50_{}_tuned_voc',
        'pascal_voc/mAP',
        'last_stage',
        'faster_rcnn_r50_baseline_voc',
    ),
    'segmentation': Task(
        'pspnet_r50_{}_tuned_camvid', 'mIoU', 'last_stage', 'pspnet_r50_baseline_camvid', 3
    ),
}
"""Of 20 pictures ten are no neighbourhood, so the segmentor's overlap is that of three."""


def rows_of(task: Task, names: Sequence[str]) -> list[tuple[Path, Point]]:
    """Config and settings of the table's rows."""
    ways = [WAYS[name] for name in task.rows if name in names]
    return [(task.path(way.stage), Point(way.label, way.fields, way.series)) for way in ways]


def search_of(task: Task) -> list[tuple[Path, Point]]:
    """Config and settings of the trials of eta, and of what they are compared with."""
    if not task.etas:
        return []
    points = [(task.path(GATED), Point('search, without FGC', {}))]
    for form, etas in task.etas.items():
        for eta in etas:
            fields = {'FGCHook.form': form, 'FGCHook.eta': eta}
            points.append((task.path(FGC), Point(f'search, {form} eta={eta}', fields)))
    return points


def tradeoff_of(task: Task) -> list[tuple[Path, Point]]:
    """Config and settings of the main rows at other costs."""
    return [
        (task.path(way.stage), Point(f'{way.label}, target={target}', fields, way.series))
        for target in task.targets
        for way in (WAYS[GATED], WAYS[FGC])
        for fields in [{**way.fields, 'BudgetHook.target': target}]
    ]


def runs_of(
    points: Sequence[tuple[Path, Point]],
    seeds: Sequence[int],
    folder: Path,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> list[Run]:
    """The runs of points, seed by seed, so that a stopped series says something of each."""
    runs = [
        run
        for config, point in points
        for run in make_runs(config, [point], seeds, folder, options, TOOLS, flags)
    ]
    return sorted(runs, key=lambda run: seeds.index(run.seed))
