# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What closed channels save in time in an exported network.

Exported ResNet backbones run by turns, in one process, on the same single
pictures:

- dense: without gates, batch norm folded into the convolutions;
- static: without gates and with as many channels as the gates leave open: what
  is possible at all at this number of MACs;
- masked: gates inside the graph, closed channels multiplied by zero;
- gathered: gates inside the graph, weights of the open channels gathered;
- unblocked: the dense one in onnxruntime without its blocked layout, which
  weights that change cannot have: by how much its other convolutions are slower.

The gates decide inside the graph; the biases of their last layers are set such
that they open a random choice of channels of the given share. A repetition
times each network once, in changing order; ratios are medians over the
repetitions of the time over that of the dense network in the same format.

    python benchmarks/export.py --depths 18 50 --sizes 224x224 512x512
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import torch
import torch.nn as nn
from mmengine.logging import MMLogger
from mmengine.registry import MODELS
from speed_models import static_widths, width

from fgc_mm.files import write_files
from fgc_mm.gates import find_gates
from fgc_mm.inference.export_block import recordable
from fgc_mm.inference.export_formats import FORMATS, Onnx, Run, record
from fgc_mm.inference.export_parts import BackbonePart, Recorded
from fgc_mm.macs import count_macs

KINDS = ('dense', 'static', 'masked', 'gathered')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--depths', type=int, nargs='+', default=[18, 50], help='ResNets')
    parser.add_argument('--sizes', nargs='+', default=['224x224', '512x512'])
    parser.add_argument('--open', type=float, nargs='+', default=[0.3, 0.5, 0.7])
    parser.add_argument('--formats', nargs='+', choices=FORMATS, default=['onnx', 'torchscript'])
    parser.add_argument('--repeats', type=int, default=9, help='timed repetitions')
    parser.add_argument('--warmup', type=int, default=3, help='repetitions not timed')
    parser.add_argument('--threads', type=int, help='CPU threads, all by default')
    parser.add_argument(
        '--cpu-time',
        action='store_true',
        help='processor time in place of wall time, for a busy machine; give --threads 1 with it',
    )
    parser.add_argument('--out', type=Path, help='write all figures to a .json file')
    args = parser.parse_args()
    for size in args.sizes:
        if len(size.split('x')) != 2 or not all(part.isdigit() for part in size.split('x')):
            parser.error(f'--sizes {size}: write height x width, such as 512x512')
    if any(not 0 < share <= 1 for share in args.open):
        parser.error(f'--open {args.open}: shares must be within (0, 1]')
    return args


def build(depth: int, **options) -> nn.Module:
    model = MODELS.build(dict(type='GatedResNet', depth=depth, zero_init_residual=False, **options))
    model.init_weights()
    return model.eval()


@torch.no_grad()
def open_gates(model: nn.Module, share: float) -> None:
    """Let each gate open a share of its channels, chosen at random."""
    for gate in find_gates(model).values():
        gate.fc2.weight.mul_(1e-3)
        gate.fc2.bias.fill_(-4.0)
        gate.fc2.bias[torch.randperm(gate.channels)[: width(gate.channels, share)]] = 4.0


def exported(
    model: nn.Module, form: str, file_format: str, x: torch.Tensor, blocked: bool = True
) -> Run:
    """An exported backbone, in its runtime."""
    chosen = FORMATS[file_format]()
    with torch.no_grad(), recordable(model, form) as masks:
        network = Recorded(BackbonePart(model, ''), masks).eval()
        network(x)
        content = record(chosen, network, x, [2, 3])
    return chosen.load(content, blocked) if isinstance(chosen, Onnx) else chosen.load(content)


@torch.no_grad()
def measure(runs: dict, x: torch.Tensor, args: argparse.Namespace) -> dict[tuple, list[float]]:
    """Seconds of each network, repetition by repetition."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    times: dict[tuple, list[float]] = {kind: [] for kind in runs}
    shuffle = random.Random(0).shuffle
    for repeat in range(args.warmup + args.repeats):
        order = list(runs)
        shuffle(order)
        for kind in order:
            start = clock()
            runs[kind](x)
            seconds = clock() - start
            if repeat >= args.warmup:
                times[kind].append(seconds)
    return times


def rows_of(depth: int, size: str, share: float, args: argparse.Namespace) -> list[dict]:
    """Measure one setting."""
    x = torch.randn(1, 3, *map(int, size.split('x')))
    gated = build(depth)
    open_gates(gated, share)
    plain = build(depth, gate=None)
    narrow = build(depth, gate=None, widths=static_widths(gated, lambda _: share))
    models = dict(dense=(plain, 'masked'), static=(narrow, 'masked'))
    models.update(masked=(gated, 'masked'), gathered=(gated, 'gathered'))
    macs = {kind: count_macs(model, x)[0].model_executed for kind, (model, _) in models.items()}
    macs['masked'] = macs['dense']  # closed channels are computed all the same
    runs = {
        (file_format, kind): exported(*models[kind], file_format, x)
        for file_format in args.formats
        for kind in KINDS
    }
    if 'onnx' in args.formats:
        runs['onnx', 'unblocked'] = exported(plain, 'masked', 'onnx', x, blocked=False)
        macs['unblocked'] = macs['dense']
    times = measure(runs, x, args)
    rows = []
    for (file_format, kind), own in times.items():
        pairs = zip(own, times[file_format, 'dense'], strict=True)
        rows.append(
            dict(
                network=f'ResNet-{depth}',
                size=size,
                open_share=share,
                format=file_format,
                kind=kind,
                seconds=statistics.median(own),
                time_ratio=statistics.median(mine / dense for mine, dense in pairs),
                macs_ratio=macs[kind] / macs['dense'],
            )
        )
    return rows


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # or it lists every initialized weight
    print(
        f'cpu, {torch.get_num_threads()} threads, torch {torch.__version__}, batch 1, median of '
        f'{args.repeats}, {"processor" if args.cpu_time else "wall"} time'
    )
    print(
        f'{"network":<11}{"size":>9}{"open":>7}  {"format":<13}{"kind":<10}{"ms":>9}{"time":>7}'
        f'{"MACs":>7}'
    )
    rows: list[dict] = []
    for depth, size, share in itertools.product(args.depths, args.sizes, args.open):
        for row in rows_of(depth, size, share, args):
            rows.append(row)
            print(
                f'{row["network"]:<11}{size:>9}{100 * share:>5.0f} %  {row["format"]:<13}'
                f'{row["kind"]:<10}{1e3 * row["seconds"]:>9.1f}{row["time_ratio"]:>7.2f}'
                f'{row["macs_ratio"]:>7.2f}',
                flush=True,
            )
        if args.out:
            content = dict(arguments=vars(args), rows=rows)
            write_files({args.out: json.dumps(content, indent=1, default=str) + '\n'})


if __name__ == '__main__':
    main()
