# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What closed channels save in time: dense, static and frozen networks.

Networks run by turns, in one process, on the same pictures:

- dense: without gates, batch norm folded into the convolutions;
- static: without gates and with as many channels as the gates leave open, batch
  norm folded: what is possible at all at this number of MACs;
- sparse: with gates, frozen (fgc_mm.freeze): closed channels not computed.

A random choice of channels is open, another one for each gate, picture and repetition: the gates
are evaluated and then overruled. A repetition times each network
once, in random order; ratios are medians over the repetitions of ratios
within one. The realized share is (1 - time / dense time) / (1 - MACs / dense
MACs); the MACs are those of open channels and of the gates themselves.

    python benchmarks/speed.py --depths 18 34 50 --sizes 224x224 512x512 800x600
    python benchmarks/speed.py --models faster_rcnn pspnet --sizes 800x600 512x512
    python benchmarks/speed.py --trained CONFIG CHECKPOINT
    python benchmarks/speed.py --report a.json b.json --plot speed.png

--trained takes the backbone of a trained model with the gates as they decide on its test
pictures; the static network there has the mean number of open channels of each
gate. With it there is a fourth one on demand, slim: without the channels that no picture of
its test set opens, as tools/slim.py makes it, and frozen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
from mmengine.logging import MMLogger
from speed_models import (
    MODELS_WITH_HEADS,
    Networks,
    backbone_networks,
    task_networks,
    trained_networks,
)
from speed_plot import draw, table

from fgc_mm.files import write_files
from fgc_mm.inference import keep_memory
from fgc_mm.macs import count_macs

LAYOUTS = dict(channels_last=torch.channels_last, contiguous=torch.contiguous_format)
DISTURBED = 0.03
KINDS = ('dense', 'static', 'sparse', 'slim')


@dataclass
class Row:
    """Figures of one network at one setting.

    Attributes:
        network (str): Name of the network.
        size (str): Height x width of the pictures.
        batch (int): Pictures in a batch.
        open_share (float): Share of gated channels that is open.
        kind (str): One of ``KINDS``.
        seconds (float): Median time.
        time_ratio (float): Median of time / time of the dense one.
        macs_ratio (float): Executed MACs / MACs of the dense one.
        realized (float): Time saved / MACs saved; nan where nothing is saved.
    """

    network: str
    size: str
    batch: int
    open_share: float
    kind: str
    seconds: float
    time_ratio: float
    macs_ratio: float
    realized: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--depths', type=int, nargs='*', default=[18, 34, 50], help='ResNets')
    parser.add_argument(
        '--models', nargs='*', default=[], choices=MODELS_WITH_HEADS, help='whole models (R-50)'
    )
    parser.add_argument('--sizes', nargs='+', default=['224x224', '512x512', '800x600'])
    parser.add_argument('--batches', type=int, nargs='+', default=[1, 8])
    parser.add_argument('--open', type=float, nargs='+', default=[0.3, 0.5, 0.7])
    parser.add_argument('--trained', nargs=2, metavar=('CONFIG', 'CHECKPOINT'))
    parser.add_argument('--pictures', type=int, default=8, help='test pictures with --trained')
    parser.add_argument(
        '--kinds',
        nargs='+',
        choices=KINDS,
        default=list(KINDS[:-1]),
        help='networks to time; slim with --trained only',
    )
    parser.add_argument('--repeats', type=int, default=9, help='timed repetitions')
    parser.add_argument('--warmup', type=int, default=2, help='repetitions not timed')
    parser.add_argument(
        '--again', type=int, default=30, help='disturbed repetitions of a setting to make again'
    )
    parser.add_argument(
        '--layout', choices=LAYOUTS, default='channels_last', help='of weights and pictures, of all'
    )
    parser.add_argument('--half', action='store_true', help='half precision, for GPUs')
    parser.add_argument('--threads', type=int, help='CPU threads, all by default')
    parser.add_argument(
        '--cpu-time',
        action='store_true',
        help='processor time in place of wall time, for a busy machine; give --threads 1 with it',
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--out', type=Path, help='write all figures to a .json file')
    parser.add_argument('--plot', type=Path, help='draw the realized share to a .png file')
    parser.add_argument(
        '--report', type=Path, nargs='+', help='measure nothing: table and plot of .json files'
    )
    args = parser.parse_args()
    for size in args.sizes:
        if len(size.split('x')) != 2 or not all(part.isdigit() for part in size.split('x')):
            parser.error(f'--sizes {size}: write height x width, such as 512x512')
    if any(not 0 < share <= 1 for share in args.open):
        parser.error(f'--open {args.open}: shares must be within (0, 1]')
    if 'slim' in args.kinds and not args.trained:
        parser.error('--kinds slim: give --trained CONFIG CHECKPOINT, whose pictures decide')
    return args


def timed(network: Callable, clock: Callable, cuda: bool) -> float:
    """Time of one forward."""
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    network()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


class Others:
    """How much of the machine's processors is used by anything but this process."""

    def __init__(self) -> None:
        self.tick = os.sysconf('SC_CLK_TCK') if hasattr(os, 'sysconf') else 100
        self.restart()

    def restart(self) -> None:
        """Forget what was."""
        self.start = self._read()

    def share(self) -> float:
        """Their part since the last restart, 0 to 1."""
        wall, busy, own = (now - then for now, then in zip(self._read(), self.start, strict=True))
        # The counters tick, and are read one after the other.
        left = busy - own - 3 / self.tick
        return max(left, 0.0) / max(wall * (os.cpu_count() or 1), 1e-9)

    def _read(self) -> tuple[float, float, float]:
        try:
            with open('/proc/stat') as file:
                ticks = list(map(int, file.readline().split()[1:9]))
        except (OSError, ValueError):
            return time.perf_counter(), 0.0, 0.0
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for a disk
        return time.perf_counter(), busy / self.tick, time.process_time()


@torch.no_grad()
def measure(networks: Networks, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each kind, repetition by repetition."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    wanted = [kind for kind in KINDS if kind == 'dense' or kind in args.kinds]
    chosen = [kind for kind in wanted if kind in networks.calls]
    times: dict[str, list[float]] = {kind: [] for kind in chosen}
    orders = random.Random(0)
    others, warmup, again = Others(), args.warmup, args.again
    while len(times['dense']) < args.repeats:
        networks.next_repetition()
        others.restart()
        found = {
            kind: timed(networks.calls[kind], clock, args.device == 'cuda')
            for kind in orders.sample(chosen, len(chosen))
        }
        if warmup:
            warmup -= 1
        elif again and others.share() > DISTURBED:
            again -= 1
        else:
            for kind, seconds in found.items():
                times[kind].append(seconds)
    if again < args.again:
        print(f'# {args.again - again} disturbed repetitions made again', flush=True)
    return times


@torch.no_grad()
def rows_of(networks: Networks, args: argparse.Namespace) -> list[Row]:
    """Measure one setting."""
    macs = networks.macs(_count)
    networks.settle()
    times = measure(networks, args)
    rows = []
    for kind in times:
        pairs = zip(times[kind], times['dense'], strict=True)
        time_ratio = statistics.median(own / dense for own, dense in pairs)
        macs_ratio = macs[kind] / macs['dense']
        saved = 1 - macs_ratio
        rows.append(
            Row(
                networks.name,
                networks.size,
                networks.batch,
                networks.open_share,
                kind,
                statistics.median(times[kind]),
                time_ratio,
                macs_ratio,
                (1 - time_ratio) / saved if saved > 1e-6 else float('nan'),
            )
        )
    return rows


def _count(model: nn.Module, *inputs, **kwargs) -> float:
    return sum(image.model_executed for image in count_macs(model, *inputs, **kwargs))


def settings(args: argparse.Namespace):
    """All networks to measure, one after the other."""
    if args.trained:
        yield from trained_networks(*args.trained, args)
        return
    for name in [*(f'ResNet-{depth}' for depth in args.depths), *args.models]:
        make = backbone_networks if name.startswith('ResNet-') else task_networks
        for size, batch in itertools.product(args.sizes, args.batches):
            for share in args.open:
                yield make(name, tuple(map(int, size.split('x'))), batch, share, args)


def print_row(row: Row) -> None:
    realized = '' if row.realized != row.realized else f'{100 * row.realized:.0f} %'
    print(
        f'{row.network:<16}{row.size:>9}{row.batch:>6}{100 * row.open_share:>6.0f} %  '
        f'{row.kind:<14}{1000 * row.seconds:>10.1f}{row.time_ratio:>8.3f}'
        f'{row.macs_ratio:>8.3f}{realized:>10}',
        flush=True,
    )


def main() -> None:
    args = parse_args()
    if args.report:
        known = [row for path in args.report for row in json.loads(path.read_text())['rows']]
        print(table(known))
        if args.plot:
            draw(known, args.plot)
        return
    keep_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # or it lists every initialized weight
    print(
        f'{args.device}, {torch.get_num_threads()} threads, {args.layout}, torch '
        f'{torch.__version__}, median of {args.repeats}, '
        f'{"processor" if args.cpu_time else "wall"} time'
    )
    print(
        f'{"network":<16}{"size":>9}{"batch":>6}{"open":>8}  {"kind":<14}{"ms":>10}{"time":>8}'
        f'{"MACs":>8}{"realized":>10}'
    )
    rows: list[Row] = []
    for networks in settings(args):
        fresh = rows_of(networks, args)
        for row in fresh:
            print_row(row)
        rows += fresh
        if args.out:
            content = dict(arguments=vars(args), rows=[asdict(row) for row in rows])
            write_files({args.out: json.dumps(content, indent=1, default=str) + '\n'})
    if args.plot:
        draw([asdict(row) for row in rows], args.plot)


if __name__ == '__main__':
    main()
