# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What Feature-Gate Coupling costs.

Without options: neighbors, loss, gradient and bank updates of one layer
against the plain way (dense similarity matrix, top-k, dense softmax kept for
backward). A repetition times each way in turn, so that a change of the
machine's speed meets all; tables show medians, the median of the ratios within
a repetition, and the spread of that ratio (its middle half).

    python benchmarks/fgc.py                       # N=50,000, D=64, B=256, k=200
    python benchmarks/fgc.py --scaling --plot fgc_cost.png
    python benchmarks/fgc.py --large               # N=1,281,167, D=512: 6 GB of memory
    python benchmarks/fgc.py --backends            # torch against faiss
    python benchmarks/fgc.py --approximate         # exact against approximate search
    python benchmarks/fgc.py --step                # a training step of gated ResNet-20
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from fgc_layers import PlainCoupling, batch_of, run_ours, run_plain, trained_layer
from fgc_plot import draw

from fgc_mm.coupling import ApproximateSearch, Coupling, MemoryBank, nearest_neighbors
from fgc_mm.coupling.memory_bank import unit_rows

IMAGENET = 1_281_167
CLOCK = time.perf_counter


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--instances', type=int, default=50_000, help='N')
    parser.add_argument('--dim', type=int, default=64, help='D')
    parser.add_argument('--batch', type=int, default=256, help='B')
    parser.add_argument('--k', type=int, default=200)
    parser.add_argument('--form', default='mean_log')
    parser.add_argument('--repeats', type=int, default=11)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument(
        '--cpu-time',
        action='store_true',
        help='processor time of this process in place of wall time, for a machine that others '
        'use; give --threads 1 with it, waiting threads count too',
    )
    parser.add_argument('--scaling', action='store_true', help='cost against N')
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[10_000, 50_000, 200_000, IMAGENET], help='its N'
    )
    parser.add_argument(
        '--plain-limit', type=int, default=200_000, help='largest N of the plain way'
    )
    parser.add_argument('--plot', type=Path, help='picture of --scaling, as .png and .svg')
    parser.add_argument('--large', action='store_true', help='one step at the size of ImageNet')
    parser.add_argument('--backends', action='store_true', help='torch against faiss')
    parser.add_argument('--approximate', action='store_true', help='recall and cost')
    parser.add_argument('--step', action='store_true', help='training step of gated ResNet-20')
    return parser.parse_args()


def interleaved(ways: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, turn by turn; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = CLOCK()
            way()
            if repeat:
                times[name].append(CLOCK() - start)
    return times


def ratio(slow: list[float], fast: list[float]) -> str:
    """Median ratio within a repetition, and its middle half."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[len(ratios) - 1 - len(ratios) // 4]
    return f'{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})'


def ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


class PeakMemory:
    """Peak resident memory over that at the start, sampled (Linux)."""

    def __enter__(self) -> PeakMemory:
        # What earlier work has freed is given back, or its reuse would not be seen.
        ctypes.CDLL(None).malloc_trim(0)
        self.start = self.peak = self._now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()
        self.megabytes = (self.peak - self.start) / 1e6

    def _watch(self) -> None:
        while not self.over.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        with open('/proc/self/statm') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def compare(size: int, args, plain: bool = True) -> dict:
    """Time and peak memory of one layer's step, ours and plain."""
    layer = trained_layer(size, args, args.dim)
    batch = batch_of(layer, args)
    ways: dict[str, Callable] = {'ours': lambda: run_ours(layer, batch)}
    if plain:
        dense = PlainCoupling(layer)
        ways['plain'] = lambda: run_plain(dense, batch)
        gradient = ways['plain']()
        error = float((ways['ours']() - gradient).norm() / gradient.norm())
        assert error < 1e-3, f'the two ways disagree by {error:.1e}'
    repeats = args.repeats if size <= 200_000 else max(3, args.repeats // 3)
    result = dict(size=size, times=interleaved(ways, repeats))
    for name, way in ways.items():
        with PeakMemory() as memory:
            way()
        result[name] = memory.megabytes
    layer_parts = {
        'search': lambda: layer.find(*batch),
        'update': lambda: layer.update(*batch),
    }
    result['parts'] = {n: ms(t) for n, t in interleaved(layer_parts, repeats).items()}
    return result


def show(results: list[dict], args) -> None:
    print(f'\nOne layer: D={args.dim}, B={args.batch}, k={args.k}, {args.form}, ', end='')
    print(f'{args.threads} threads; ms per step, MB beyond the banks\n')
    print('| N | ours | search | loss, gradient | updates | MB | plain | MB | plain / ours |')
    print('| --- | --- | --- | --- | --- | --- | --- | --- | --- |')
    for r in results:
        ours, parts = ms(r['times']['ours']), r['parts']
        rest = ours - parts['search'] - parts['update']
        line = f'| {r["size"]:,} | {ours:.0f} | {parts["search"]:.0f} | {rest:.0f} '
        line += f'| {parts["update"]:.1f} | {r["ours"]:.0f} '
        if 'plain' in r:
            line += f'| {ms(r["times"]["plain"]):.0f} | {r["plain"]:.0f} '
            line += f'| {ratio(r["times"]["plain"], r["times"]["ours"])} |'
        else:
            line += '| | | |'
        print(line)


def large(args) -> None:
    """One step at the size of ImageNet, with its peak memory."""
    dim, size = 512, IMAGENET
    layer = trained_layer(size, args, dim)
    batch = batch_of(layer, args)
    run_ours(layer, batch)
    with PeakMemory() as memory:
        start = CLOCK()
        run_ours(layer, batch)
        seconds = CLOCK() - start
    buffer = 4 * args.batch * size / 1e6
    print(f'\nN={size:,}, D={dim}, B={args.batch}, k={args.k}: {seconds:.1f} s per step and layer,')
    print(f'peak {memory.megabytes:.0f} MB beyond the banks (2 x {4 * size * dim / 1e6:.0f} MB);')
    print(f'one B x N buffer of the plain way: {buffer:.0f} MB, ', end='')
    print(f'so {100 * memory.megabytes / buffer:.1f} % of it (the plain way needs four)')


def backends(args) -> None:
    """Back ends of the exact search over N, D and k."""
    print(f'\nExact search, B={args.batch}, {args.threads} threads, ms\n')
    print('| N | D | k | torch | faiss | mm + topk | faiss / torch |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    grid = [(n, 64, k) for n in (1_000, 10_000, 50_000, 200_000) for k in (1, 4, 200)]
    grid += [(10_000, 512, 200), (50_000, 512, 200), (50_000, 64, 1024), (50_000, 64, 4096)]
    for size, dim, k in grid:
        layer = trained_layer(size, argparse.Namespace(k=min(k, size - 1), form='mean_log'), dim)
        data, (feature, _, own) = layer.feature_bank.data, batch_of(layer, args)
        queries = unit_rows(feature)
        k = layer.k

        def dense(queries=queries, data=data, k=k):
            return (queries @ data.t()).topk(k, dim=1)

        ways: dict[str, Callable] = {
            name: lambda name=name, q=queries, d=data, k=k, own=own: nearest_neighbors(
                q, d, k, own, name
            )
            for name in ('torch', 'faiss')
        }
        times = interleaved({**ways, 'dense': dense}, args.repeats)
        print(
            f'| {size:,} | {dim} | {k} | {ms(times["torch"]):.1f} | {ms(times["faiss"]):.1f} '
            f'| {ms(times["dense"]):.1f} | {ratio(times["faiss"], times["torch"])} |'
        )


def approximate(args) -> None:
    """Approximate against exact search on features that vary in few directions."""
    size, dim, rank = 200_000, 512, 40
    bank = MemoryBank(size, dim)
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(rank, dim, generator=generator)
    for start in range(0, size, 8192):
        rows = bank.data[start : start + 8192]
        factors = torch.randn(len(rows), rank, generator=generator)
        rows.copy_(unit_rows((factors @ mixing + 40 * rows).relu_()))
    own = torch.randperm(size, generator=generator)[: args.batch]
    queries = unit_rows(bank.data[own] + 0.01 * torch.rand(args.batch, dim, generator=generator))
    print(f'\nApproximate search: N={size:,}, D={dim}, B={args.batch}, k={args.k}\n')
    print('| dims | oversample | recall | ms | exact ms | exact / approximate |')
    print('| --- | --- | --- | --- | --- | --- |')
    for dims in (32, 64):
        for oversample in (2, 4):
            search = ApproximateSearch(bank, dims, oversample, recall_queries=64)
            search.search(queries, args.k, own)
            times = interleaved(
                {
                    'exact': lambda: nearest_neighbors(queries, bank.data, args.k, own),
                    'approximate': lambda s=search: s.search(queries, args.k, own),
                },
                max(3, args.repeats // 3),
            )
            print(
                f'| {dims} | {oversample} | {search.recall:.3f} | {ms(times["approximate"]):.0f} '
                f'| {ms(times["exact"]):.0f} | {ratio(times["exact"], times["approximate"])} |'
            )


def step(args) -> None:
    """A training step of gated ResNet-20 with FGC on two blocks, and without."""
    from fgc_mm.nets import GatedResNetCifar

    torch.manual_seed(0)
    backbone = GatedResNetCifar(depth=20).train()
    head = torch.nn.Linear(64, 10)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
    coupling = Coupling(
        backbone, args.instances, layers=[-2, -1], eta=0.003, k=args.k, form=args.form
    )
    for seed, name in enumerate(coupling.layers):
        coupling.layers[name] = trained_layer(args.instances, args, 64, seed=seed)
    pictures = torch.rand(args.batch, 3, 32, 32)
    labels = torch.randint(10, (args.batch,))

    def train(with_fgc: bool) -> None:
        indices = torch.randperm(args.instances)[: args.batch]
        out = backbone(pictures)[-1].mean(dim=(2, 3))
        loss = F.cross_entropy(head(out), labels)
        if with_fgc:
            loss = loss + coupling.loss(indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        coupling.step()

    times = interleaved(
        {'without': lambda: train(False), 'with': lambda: train(True)}, args.repeats
    )
    print(
        f'\nGated ResNet-20, B={args.batch}, N={args.instances:,}, k={args.k}, two blocks, ', end=''
    )
    print(f'{args.threads} threads: step without FGC {ms(times["without"]):.0f} ms, ', end='')
    print(f'with {ms(times["with"]):.0f} ms, ratio {ratio(times["with"], times["without"])}')


def main() -> None:
    global CLOCK
    args = parse_args()
    if args.cpu_time:
        CLOCK = time.process_time
    torch.set_num_threads(args.threads)
    try:
        import faiss

        faiss.omp_set_num_threads(args.threads)
    except ImportError:
        pass
    if args.scaling:
        results = [compare(size, args, size <= args.plain_limit) for size in args.sizes]
        show(results, args)
        if args.plot:
            caption = f'D={args.dim}, B={args.batch}, k={args.k}, {args.threads} CPU threads'
            written = draw(results, args.plot, caption)
            print(f'\nwritten: {", ".join(map(str, written))}')
    for wanted, part in (
        (args.large, large),
        (args.backends, backends),
        (args.approximate, approximate),
        (args.step, step),
    ):
        if wanted:
            part(args)
    if not (args.scaling or args.large or args.backends or args.approximate or args.step):
        show([compare(args.instances, args)], args)


if __name__ == '__main__':
    main()
