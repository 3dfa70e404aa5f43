# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a trained network's decisions picture by picture are worth to it.

Tests it again with other decisions in place of its own, without training it again:

- own: as it decides;
- imposed: the same, by the way the others take: a control;
- class: those of another picture of the same class (known from the annotations, so they
  may tell a network something about the picture);
- other: those of any other picture;
- static: the same for all pictures, in each gate the channels that are open most often, as
  many as are open on average;
- open: everything open, which costs more.

First in the coupled blocks alone, then in all of them. What is lost with the decisions of
another picture is what this network's choice by picture contributes. The network is used to
its own decisions: a static one that is trained as such loses less.

    python experiments/decisions.py --trained CONFIG CHECKPOINT --layers -2 -1
    python experiments/decisions.py --trained A.py a.pth --trained B.py b.pth --layers last_stage
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis.gate_table import GateTable
from fgc_mm.analysis.gather import gather, set_aside
from fgc_mm.analysis.selection import run_names
from fgc_mm.analysis.tradeoff import RATIO, task_metric
from fgc_mm.cli.arguments import block
from fgc_mm.cli.run import run as run_command
from fgc_mm.errors import UsageError
from fgc_mm.evaluation.summary import add_derived, add_macs_hook
from fgc_mm.files import check_file, write_files
from fgc_mm.gates import find_gates
from fgc_mm.runtime import launch, unwrap
from fgc_mm.runtime.config.files import read_config

PROJECT = Path(__file__).parents[1]
POLICIES = ('own', 'imposed', 'class', 'other', 'static', 'open')
SEVERAL = ('class', 'other')
"""Those in which chance plays a part."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--trained', nargs=2, action='append', required=True, metavar=('CONFIG', 'CHECKPOINT')
    )
    parser.add_argument(
        '--layers', nargs='+', type=block, default=['last_stage'], help='the coupled blocks'
    )
    parser.add_argument(
        '--seeds', type=int, nargs='+', default=[0, 1, 2], help='which other picture: the mean'
    )
    parser.add_argument('--out', help='write the figures to this .json file')
    return parser.parse_args()


def exchanged(classes: np.ndarray, rng: np.random.Generator, within: bool) -> np.ndarray:
    """For every picture the number of another one, each taken once.

    Args:
        classes (ndarray): Class of each picture.
        rng (Generator): Chooses.
        within (bool): Whether it is of the same class; the only one of its class
            keeps its own decisions.
    """
    partner = np.arange(len(classes))
    groups = [np.flatnonzero(classes == c) for c in np.unique(classes)] if within else [1 * partner]
    for group in groups:
        order = rng.permutation(group)
        partner[order] = np.roll(order, 1)
    return partner


def decisions(table: GateTable, policy: str, seed: int) -> Optional[dict[str, np.ndarray]]:
    """Gate -> N x C decisions of a policy; None for a network's own."""
    if policy == 'own':
        return None
    if policy == 'imposed':
        return dict(table.mask)
    if policy in SEVERAL:
        rng = np.random.default_rng(seed)
        partner = exchanged(table.main_class, rng, within=policy == 'class')
        return {name: mask[partner] for name, mask in table.mask.items()}
    return {name: _alike(mask, policy == 'open') for name, mask in table.mask.items()}


def _alike(mask: np.ndarray, everything: bool) -> np.ndarray:
    """The same decisions for all: as many channels as are open on average, or all of them."""
    count = mask.shape[1] if everything else round(float(mask.sum(axis=1).mean()))
    row = np.zeros(mask.shape[1], mask.dtype)
    row[np.argsort(-mask.mean(axis=0), kind='stable')[:count]] = 1
    return np.broadcast_to(row, mask.shape)


class ImposeHook(Hook):
    """Forces the decisions of each test picture.

    Attributes:
        masks (Mapping): Gate -> decisions of all pictures, in the order of the test
            set; gates that are not in it decide by themselves.
    """

    def __init__(self) -> None:
        self.masks: Mapping[str, np.ndarray] = {}

    def before_test(self, runner: Runner) -> None:
        self.place = 0

    def before_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        count = len(data_batch['data_samples'])
        for name, gate in find_gates(unwrap(runner.model)).items():
            own = self.masks.get(name)
            part = slice(self.place, self.place + count)
            gate.forced = None if own is None else torch.from_numpy(np.array(own[part]))
        self.place += count

    def after_test(self, runner: Runner) -> None:
        for gate in find_gates(unwrap(runner.model)).values():
            gate.forced = None


def measure(
    config: str, checkpoint: str, layers: Sequence[Union[str, int]], seeds: Sequence[int]
) -> list[dict]:
    """Metric and saved MACs of a network under every policy, part by part."""
    cfg = read_config(config)
    cfg.launcher = 'none'
    table = gather(cfg, checkpoint)
    chosen = {'coupled blocks': table.choose(layers, '--layers'), 'all blocks': table.layers}
    cfg.test_dataloader.sampler = dict(type='DefaultSampler', shuffle=False)  # as gathered
    launch.prepare_data(cfg, ('test',))
    launch.fill_dataloader_defaults(cfg)
    add_macs_hook(cfg)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        set_aside(cfg, checkpoint, folder)
        runner = launch.build_runner(cfg)
        if not all(gate.hard for gate in find_gates(unwrap(runner.model)).values()):
            raise UsageError(
                f'{config}: its gates scale what they leave open (FBSGate), which imposed '
                'decisions would not; take a network with BinConcreteGate'
            )
        impose = ImposeHook()
        runner.register_hook(impose)
        for part, names in chosen.items():
            for policy in POLICIES:
                if policy == 'own' and rows:  # the same in every part
                    rows.append({**rows[0], 'part': part})
                    continue
                tests = []
                for seed in seeds if policy in SEVERAL else seeds[:1]:
                    masks = decisions(table, policy, seed)
                    impose.masks = {} if masks is None else {n: masks[n] for n in names}
                    tests.append(add_derived(runner.test()))
                metric = task_metric(tests)
                values = [float(test[metric]) for test in tests]
                saved = statistics.fmean(test[RATIO] for test in tests)
                rows.append(
                    dict(part=part, policy=policy, metric=metric, values=values, saved=saved)
                )
                print(part, policy, metric, *values, flush=True)
    return rows


def show(measured: Mapping[str, list[dict]]) -> str:
    """A table in markdown: a line for each network and part, a column for each policy."""
    metric = next(iter(measured.values()))[0]['metric']
    lines = [f'| {metric} | decisions exchanged in | ' + ' | '.join(POLICIES) + ' |']
    lines.append('| --- ' * (2 + len(POLICIES)) + '|')
    for name, rows in measured.items():
        for part in dict.fromkeys(row['part'] for row in rows):
            own = {row['policy']: row for row in rows if row['part'] == part}
            cells = [_cell(own[policy]) for policy in POLICIES]
            lines.append(f'| {name} | {part} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    mean = f'{statistics.fmean(row["values"]):.4g}'
    if len(row['values']) > 1:
        mean += f' ± {statistics.stdev(row["values"]):.2g}'
    return f'{mean} ({row["saved"]:.1f} % saved)'


def main() -> None:
    args = parse_args()
    trained = [[os.path.abspath(path) for path in pair] for pair in args.trained]
    out = os.path.abspath(args.out) if args.out else None
    if out:
        check_file(out, '--out')
    os.chdir(PROJECT)  # where configs look for their data
    names = run_names(None, [Path(checkpoint) for _, checkpoint in trained])
    measured = {}
    for name, (config, checkpoint) in zip(names, trained, strict=True):
        measured[name] = measure(config, checkpoint, args.layers, args.seeds)
        if out:  # what is done stays if the next one fails
            write_files({out: json.dumps(measured, indent=1) + '\n'})
    print('\n' + show(measured))


if __name__ == '__main__':
    run_command(main, 'the decisions cannot be exchanged')
