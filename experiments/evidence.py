# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Does coupling do what it is for? Gated networks with FGC against the same without.

Trains both configs of a protocol with the same seeds, moves the evaluation
threshold of each until the two of a seed are equally open, and compares on
unseen pictures: accuracy, and in the coupled gates neighbor overlap, the share
of the k nearest pictures in feature space that are also the k nearest in gate
space. What is trained or measured already is not done again.

    python experiments/evidence.py digits
    python experiments/evidence.py cifar10
    python experiments/evidence.py digits --seeds 0 --eta 0.01 0.03 0.1 --form mean_log   # a search
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Optional, Union

import numpy as np
import torch
from gate_collector import GateCollectorHook, openness
from hook_fields import set_fields
from mmengine.config import Config
from mmengine.runner import Runner
from runs import Run

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis.gather import set_aside
from fgc_mm.coupling import neighbor_overlap
from fgc_mm.files import write_files
from fgc_mm.gates import select_blocks, set_threshold
from fgc_mm.runtime import launch, unwrap

PROJECT = Path(__file__).parents[1]
PROTOCOLS = {
    'digits': ('configs/demo/resnet18_digits_gated.py', 'configs/demo/resnet18_digits_fgc.py'),
    'cifar10': (
        'configs/short/resnet20_gated_cifar10.py',
        'configs/short/resnet20_fgc_cifar10.py',
    ),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('protocol', choices=PROTOCOLS)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--neighbors', type=int, default=10, help='of the overlap')
    parser.add_argument('--work-dir', default='work_dirs/evidence')
    parser.add_argument('--eta', type=float, nargs='+', help="weights in place of the config's")
    parser.add_argument('--form', help="contrast in place of the config's")
    parser.add_argument('--k', type=int, help="neighbors in place of the config's")
    parser.add_argument('--space', help="'logits' or 'probs' in place of the config's")
    parser.add_argument('--layers', help="such as last_stage or -2,-1, in place of the config's")
    parser.add_argument('--train-only', action='store_true', help='no evaluation, no table')
    return parser.parse_args()


def blocks(text: Optional[str]) -> Union[str, list[int], None]:
    """Numbers of blocks, or a name that FGCHook knows."""
    if text is None or text.lstrip('-')[:1].isalpha():
        return text
    return [int(number) for number in text.split(',')]


class Point:
    """One way to train: a config, and what the command line changes in its FGCHook."""

    def __init__(self, config: str, folder: Path, **changes) -> None:
        self.base, self.folder = PROJECT / config, folder
        changes = {name: value for name, value in changes.items() if value is not None}
        plain = {n: str(v).strip('[]').replace(' ', '') for n, v in changes.items()}
        self.name = self.base.stem + ''.join(f'_{n}{v}' for n, v in plain.items())
        hooks = Config.fromfile(self.base).to_dict()['custom_hooks']
        self.hooks = set_fields(hooks, {f'FGCHook.{n}': v for n, v in changes.items()})

    def train(self, seed: int) -> tuple[Config, Path]:
        """Train unless that is done; the config of the run and its checkpoint."""
        run = Run(
            base=self.base,
            folder=self.folder / f'{self.name}_seed{seed}',
            config=self.folder / f'{self.name}.py',
            tools=PROJECT / 'tools',
            seed=seed,
            hooks=self.hooks,
        )
        cfg = Config.fromfile(self.base)
        cfg.custom_hooks = list(self.hooks)
        last = run.folder / f'epoch_{cfg.train_cfg.max_epochs}.pth'
        if not last.exists() and not run.train():
            raise SystemExit(f'{self.name}, seed {seed}: the training failed')
        return cfg, last


class Network:
    """A trained network on the test set, at any threshold."""

    def __init__(self, cfg: Config, checkpoint: Path) -> None:
        cfg = cfg.copy()
        set_aside(cfg, str(checkpoint), tempfile.mkdtemp())
        cfg.custom_hooks = [dict(type='GatedMACsHook')]
        launch.fill_dataloader_defaults(cfg)
        self.runner = Runner.from_cfg(cfg)
        self.collector = GateCollectorHook()
        self.runner.register_hook(self.collector)

    def at(self, threshold: float) -> None:
        """Run the test set; the records are with the collector."""
        set_threshold(unwrap(self.runner.model), threshold)
        self.threshold, self.metrics = threshold, self.runner.test()

    def threshold_for(self, wanted: float, tolerance: float = 0.002) -> float:
        """The threshold at which that share of the channels is open.

        From the probabilities of one pass follows a threshold; with it, later
        gates see other inputs and decide otherwise, so again, until it fits.
        """
        for _ in range(8):
            probs = [record.probs.flatten() for record in self.collector.records.values()]
            threshold = float(np.quantile(torch.cat(probs).numpy(), 1 - wanted))
            self.at(threshold)
            if abs(openness(self.collector.records) - wanted) < tolerance:
                break
        return threshold

    def figures(self, threshold: float, layers, k: int) -> dict:
        """What the table shows, at a threshold."""
        if threshold != self.threshold:
            self.at(threshold)
        metrics, records = self.metrics, self.collector.records
        blocks = select_blocks(unwrap(self.runner.model), layers)
        overlap = {
            name: neighbor_overlap(records[name].feature, records[name].logits, k)
            for block in blocks.values()
            for name, _ in block
        }
        return dict(
            accuracy=metrics['accuracy/top1'],
            pruning=metrics['macs/pruning_ratio'],
            openness=openness(records),
            threshold=threshold,
            overlap=overlap,
        )


def coupled_layers(cfg: Config):
    return next(h for h in cfg.custom_hooks if h['type'] == 'FGCHook')['layers']


def compare(gated: Point, fgc: Point, seed: int, k: int) -> dict:
    """Figures of both ways at one openness."""
    store = fgc.folder / f'{fgc.name}_seed{seed}' / f'evidence_k{k}.json'
    if store.exists():
        return json.loads(store.read_text())
    runs = [point.train(seed) for point in (gated, fgc)]
    layers = coupled_layers(runs[1][0])
    networks = [Network(*run) for run in runs]
    open_at_half = []
    for network in networks:
        network.at(0.5)
        open_at_half.append(openness(network.collector.records))
    # The one that is more open closes down to the other.
    wanted = min(open_at_half)
    result = {}
    for name, network, share in zip(('gated', 'fgc'), networks, open_at_half, strict=True):
        threshold = 0.5 if share == wanted else network.threshold_for(wanted)
        result[name] = network.figures(threshold, layers, k)
        result[name]['openness_at_half'] = share
    write_files({store: json.dumps(result, indent=2) + '\n'})
    return result


def spread(values: list[float], digits: int) -> str:
    """Mean and standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f'{statistics.mean(values):.{digits}f} +- {error:.{digits}f}'


def show(fgc: Point, results: list[dict], k: int) -> None:
    """One table: a row for each way, and the differences within a seed."""
    gates = list(results[0]['fgc']['overlap'])
    print(f'\n{fgc.name}, {len(results)} seeds, mean +- standard error\n')
    columns = [name.removeprefix('backbone.') for name in gates]
    print(
        '| | top-1 | channels open | MACs saved | '
        + ' | '.join(f'overlap@{k} {c}' for c in columns),
        '|',
    )
    print('| --- ' * (4 + len(gates)) + '|')
    rows = {way: [r[way] for r in results] for way in ('gated', 'fgc')}
    for way, runs in rows.items():
        cells = [
            spread([r['accuracy'] for r in runs], 2),
            spread([100 * r['openness'] for r in runs], 1),
        ]
        cells += [spread([r['pruning'] for r in runs], 1)]
        cells += [spread([r['overlap'][gate] for r in runs], 3) for gate in gates]
        print(f'| {way} | ' + ' | '.join(cells) + ' |')
    pairs = list(zip(rows['gated'], rows['fgc'], strict=True))
    cells = [spread([b['accuracy'] - a['accuracy'] for a, b in pairs], 2), '', '']
    cells += [spread([b['overlap'][g] - a['overlap'][g] for a, b in pairs], 3) for g in gates]
    print('| difference | ' + ' | '.join(cells) + ' |', flush=True)


def main() -> None:
    args = parse_args()
    os.chdir(PROJECT)  # where configs look for their data
    folder = PROJECT / args.work_dir / args.protocol
    gated_config, fgc_config = PROTOCOLS[args.protocol]
    gated = Point(gated_config, folder)
    for eta in args.eta or [None]:
        changes = dict(form=args.form, eta=eta, k=args.k, space=args.space)
        fgc = Point(fgc_config, folder, **changes, layers=blocks(args.layers))
        if args.train_only:
            for seed in args.seeds:
                gated.train(seed)
                fgc.train(seed)
            continue
        results = [compare(gated, fgc, seed, args.neighbors) for seed in args.seeds]
        show(fgc, results, args.neighbors)


if __name__ == '__main__':
    main()
