# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What gates cost: a gated backbone in mask mode against the dense one.

Both networks have the same weights and inputs. A repetition times a training
step (forward and backward) or an evaluation forward of the one, then of the
other, so that a change of the machine's speed meets both; the table shows
medians and the median of the ratios of a repetition. A line before them has the time of finding
the sites and attaching the gates.

    python benchmarks/gates.py --depths 18 34 50 --size 224 --batch 16
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from mmengine.registry import MODELS

import fgc_mm


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--depths', type=int, nargs='+', default=[18, 34, 50])
    parser.add_argument('--size', type=int, default=224, help='height and width of the pictures')
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--repeats', type=int, default=7, help='timed repetitions')
    parser.add_argument('--warmup', type=int, default=2, help='repetitions not timed')
    parser.add_argument('--gate', default='BinConcreteGate', help='type of the gates')
    parser.add_argument('--threads', type=int, help='CPU threads, all by default')
    parser.add_argument(
        '--cpu-time',
        action='store_true',
        help='processor time of this process in place of wall time, for a machine that others '
        'use; give --threads 1 with it, waiting threads count too',
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    return parser.parse_args()


def train_step(model: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward of a loss on the last output."""
    model.zero_grad(set_to_none=True)
    model(x)[-1].square().mean().backward()


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor) -> None:
    """Forward only."""
    model(x)


def seconds(step: Callable, model: nn.Module, x: torch.Tensor, clock: Callable) -> float:
    """Time of one step."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    step(model, x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def compare(
    step: Callable, dense: nn.Module, gated: nn.Module, x: torch.Tensor, args
) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio of a repetition."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    pairs = []
    for repeat in range(args.warmup + args.repeats):
        # Who goes first alternates: the second finds the caches as the first left them.
        models = (dense, gated) if repeat % 2 else (gated, dense)
        times = {id(model): seconds(step, model, x, clock) for model in models}
        pairs.append((times[id(dense)], times[id(gated)]))
    pairs = pairs[args.warmup :]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[1] / pair[0] for pair in pairs),
    )


def seconds_to_gate(dense: nn.Module, args: argparse.Namespace) -> float:
    """Time of finding the sites of a network and putting gates there."""
    network, clock = copy.deepcopy(dense), time.process_time if args.cpu_time else time.perf_counter
    picture = torch.rand(1, 3, 64, 64, device=args.device)
    start = clock()
    fgc_mm.gate(network, picture)
    return clock() - start


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    print(
        f'{args.gate}, {args.size} px, batch {args.batch}, {args.device}, '
        f'{torch.get_num_threads()} threads, torch {torch.__version__}, '
        f'median of {args.repeats}, {"processor" if args.cpu_time else "wall"} time'
    )
    print(f'{"network":<10}{"step":<12}{"dense [s]":>12}{"gated [s]":>12}{"ratio":>8}')
    for depth in args.depths:
        cfg = dict(type='mmdet.GatedResNet', depth=depth, norm_eval=False, zero_init_residual=False)
        dense = MODELS.build(dict(cfg, gate=None)).to(args.device)
        dense.init_weights()
        gated = MODELS.build(dict(cfg, gate=dict(type=args.gate))).to(args.device)
        gated.load_state_dict(dense.state_dict(), strict=False)
        took = seconds_to_gate(dense, args)
        print(f'ResNet-{depth:<3}finding the sites and attaching the gates: {took:.2f} s')
        for name, step, mode in (('training', train_step, True), ('evaluation', evaluate, False)):
            for model in (dense, gated):
                model.train(mode)
            times = compare(step, dense, gated, x, args)
            print(f'ResNet-{depth:<3}{name:<12}{times[0]:>12.3f}{times[1]:>12.3f}{times[2]:>8.3f}')


if __name__ == '__main__':
    main()
