# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The rows of the table that experiments/results.py makes, and the runs behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hook_fields import Fields
from runs import Run
from sweep_points import Point, make_runs

from fgc_mm.gates.utils import Layers

PROJECT = Path(__file__).parents[1]
TOOLS = PROJECT / 'tools'
GATED, FGC = 'gated', 'fgc'
WITHOUT, WITH = 'without FGC', 'with FGC'

PLAIN = 'gated, without FGC'


@dataclass(frozen=True)
class Way:
    """A row: how a network is fine-tuned.

    Attributes:
        label (str): What the table calls it.
        stage (str): Which config of the task.
        fields (dict): What is set in its hooks. Defaults to nothing.
        series (str): Its curve in the trade-off plot. Defaults to none.
        versus (str): Label of the row that is the same without FGC. Defaults to
            none: it has no FGC.
    """

    label: str
    stage: str
    fields: Fields = field(default_factory=dict, hash=False)
    series: str = ''
    versus: str = ''


WAYS = {
    'dense': Way('dense', 'baseline'),
    'gated': Way(PLAIN, GATED, series=WITHOUT),
    'fgc': Way('FGC, mean_log', FGC, series=WITH, versus=PLAIN),
    'log_sum': Way('FGC, log_sum', FGC, {'FGCHook.form': 'log_sum'}, versus=PLAIN),
    'bas': Way('BAS', 'bas'),
    'bas_fgc': Way('BAS and FGC, mean_log', 'bas_fgc', versus='BAS'),
    'fbs': Way('FBS', 'fbs'),
    'label': Way('FGC, neighbors by label', FGC, {'FGCHook.source': 'label'}, versus=PLAIN),
    'gate': Way('FGC, neighbors by gate', FGC, {'FGCHook.source': 'gate'}, versus=PLAIN),
}
MAIN = ('dense', 'gated', 'fgc')


class Longer(NamedTuple):
    """A longer training: how many epochs, which settings are as many, and when it is coupled.

    ``coupled`` is when eta begins to rise and when it is reached, in shares of the training.
    """

    epochs: int
    settings: tuple[str, ...]
    coupled: tuple[float, float]


@dataclass(frozen=True)
class Task:
    """A protocol.

    Attributes:
        config (str): Name of its configs with ``{}`` for the stage.
        metric (str): As in ``figures.json``.
        layers (str | list[int]): Blocks whose gates are looked at in every row.
        start (str): What all rows start from: a file of public weights, or the
            config whose training makes it.
        neighbors (int): k of the overlap. Defaults to 10.
        rows (tuple[str, ...]): Keys of :data:`WAYS`. Defaults to the main ones.
        etas (dict): Form -> weights that are tried. Defaults to none.
        targets (tuple[float, ...]): Costs of the trade-off beside the config's
            own. Defaults to none.
        biases (tuple[float, ...]): First biases of the gates that are tried
            beside the config's own. Defaults to none.
        eta (float): The weight of its coupling. Defaults to 0.03.
        tried (dict): Name -> other settings of the coupling. Defaults to none.
        longer (tuple[Longer, ...]): Longer trainings. Defaults to none.
    """

    config: str
    metric: str
    layers: Layers
    start: str
    neighbors: int = 10
    rows: tuple[str, ...] = MAIN
    etas: dict[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    targets: tuple[float, ...] = ()
    biases: tuple[float, ...] = ()
    eta: float = 0.03
    tried: dict[str, dict] = field(default_factory=dict, hash=False)
    longer: tuple[Longer, ...] = ()

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
        biases=(1.0, 2.0, 5.0),
        tried={
            # A number alone would keep the config's ramp.
            'from the first step on': {'FGCHook.eta': dict(start=0, end=0, value=0.03)},
            # As many of 10,000 pictures as 200 are of CIFAR-10's 50,000.
            'k=40': {'FGCHook.k': 40},
            # The losses of gates are added up: nine of them are to weigh as much as two.
            'all blocks': {'FGCHook.layers': 'all', 'FGCHook.eta': 0.03 * 2 / 9},
        },
        longer=(
            Longer(18, ('train_cfg.max_epochs', 'param_scheduler.T_max'), coupled=(1 / 3, 1 / 2)),
        ),
    ),
    'resnet32': _cifar(32, 'resnet32-d509ac18.th', 2),
    'resnet56': _cifar(56, 'resnet56-4bfd9763.th', 4),
    'detection': Task(
        'faster_rcnn_r50_{}_tuned_voc',
        'pascal_voc/mAP',
        'last_stage',
        'faster_rcnn_r50_baseline_voc',
        etas={'mean_log': (0.0003, 0.003, 0.03)},
        # The paper's weight for detectors is far below that for classifiers.
        tried={'eta=0.003': {'FGCHook.eta': 0.003}},
        longer=(
            Longer(
                5,
                ('train_cfg.max_epochs', 'train_cfg.val_interval', 'param_scheduler.0.T_max'),
                coupled=(1 / 2, 3 / 4),
            ),
        ),
    ),
    'segmentation': Task(
        'pspnet_r50_{}_tuned_camvid',
        'mIoU',
        'last_stage',
        'pspnet_r50_baseline_camvid',
        3,
    ),
}
"""Of 20 pictures ten are no neighborhood, so the segmentor's overlap is that of three."""


class Trial(NamedTuple):
    """What is trained: a config, settings of its hooks, and further ``--cfg-options``.

    ``versus`` is the label of the same without FGC; '' if it has none.
    """

    config: Path
    point: Point
    options: tuple[str, ...] = ()
    versus: str = ''


def rows_of(task: Task, names: Sequence[str]) -> list[Trial]:
    """The table's rows."""
    ways = [WAYS[name] for name in task.rows if name in names]
    return [
        Trial(task.path(w.stage), Point(w.label, w.fields, w.series), versus=w.versus) for w in ways
    ]


def search_of(task: Task) -> list[Trial]:
    """Trials of eta, and what they are compared with."""
    if not task.etas:
        return []
    without = Point('search, without FGC', {})
    trials = [Trial(task.path(GATED), without)]
    for form, etas in task.etas.items():
        for eta in etas:
            fields = {'FGCHook.form': form, 'FGCHook.eta': eta}
            point = Point(f'search, {form} eta={eta}', fields)
            trials.append(Trial(task.path(FGC), point, versus=without.label))
    return trials


def biases_of(task: Task) -> list[Trial]:
    """Trials of the gates' first bias."""
    return [
        Trial(
            task.path(GATED),
            Point(f'without FGC, bias_init={bias}', {}),
            (f'model.backbone.gate.bias_init={bias}',),
        )
        for bias in task.biases
    ]


def tried_of(task: Task) -> list[Trial]:
    """What else could make a difference to coupling."""
    trials = [
        Trial(task.path(FGC), Point(f'FGC, {name}', fields), versus=PLAIN)
        for name, fields in task.tried.items()
    ]
    for longer in task.longer:
        trials += _longer(task, longer)
    return trials


def _longer(task: Task, longer: Longer) -> list[Trial]:
    """The main rows in a longer training, and batch shaping in it where the task has that."""
    epochs = longer.epochs
    options = tuple(f'{setting}={epochs}' for setting in longer.settings)
    start, end = (share * epochs for share in longer.coupled)
    eta = dict(start=start, end=end, value=task.eta)

    def trials(stages: tuple[str, str], name: str, common: Fields, **forms: Fields) -> list[Trial]:
        """Without FGC, and with it in some forms."""
        label = f'{epochs} epochs, {name}'
        without = Trial(task.path(stages[0]), Point(f'{label}without FGC', common), options)
        points = [Point(label + form, {**common, **own}) for form, own in forms.items()]
        versus = without.point.label
        return [without, *(Trial(task.path(stages[1]), p, options, versus) for p in points)]

    plain = {'FGCHook.eta': eta}
    dense = Trial(task.path('baseline'), Point(f'{epochs} epochs, dense', {}), options)
    made = [dense, *trials((GATED, FGC), '', {}, **{WITH: plain})]
    if 'bas' in task.rows:
        zeta = dict(start=0, end=2 * epochs / 3, begin=0.02, value=0)
        # The weight and form of the authors' code, after the batch shaping it starts with.
        theirs = {'FGCHook.eta': {**eta, 'value': 0.003}, 'FGCHook.form': 'log_sum'}
        forms = {WITH: plain, 'log_sum eta=0.003': theirs}
        made += trials(('bas', 'bas_fgc'), 'BAS, ', {'BatchShapingHook.zeta': zeta}, **forms)
    return made


def tradeoff_of(task: Task) -> list[Trial]:
    """The main rows at other costs."""
    return [
        Trial(
            task.path(way.stage),
            Point(f'{way.label}, target={target}', fields, way.series),
            versus=f'{way.versus}, target={target}' if way.versus else '',
        )
        for target in task.targets
        for way in (WAYS[GATED], WAYS[FGC])
        for fields in [{**way.fields, 'BudgetHook.target': target}]
    ]


def runs_of(
    trials: Sequence[Trial],
    seeds: Sequence[int],
    folder: Path,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> list[Run]:
    """The runs of trials, seed by seed, so that a stopped series says something of each."""
    runs = [
        run
        for config, point, own, _ in trials
        for run in make_runs(config, [point], seeds, folder, [*own, *options], TOOLS, flags)
    ]
    return sorted(runs, key=lambda run: seeds.index(run.seed))
