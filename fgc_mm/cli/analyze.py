# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Draw figures of what the gates of a trained network do, with the tables behind them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..errors import UsageError
from .arguments import add_checkpoint, add_config, block

if TYPE_CHECKING:
    from mmengine.config import Config

    from ..analysis.gate_table import GateTable

SUBJECT = 'the figures cannot be made'
Draw = Callable[[argparse.Namespace, Path], 'list[Path]']


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest='figure', required=True, metavar='FIGURE')
    common, layered, spaced, beside = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    add_config(common, 'config file of a model with gates')
    add_checkpoint(common)
    common.add_argument('--out-dir', help='where to write (default: analysis/ beside it)')
    common.add_argument('--split', choices=['val', 'test'], default='test')
    common.add_argument(
        '--max-images', type=int, help='take that many pictures, evenly spread over the split'
    )
    common.add_argument('--no-cache', action='store_true', help='run the network again')
    layered.add_argument(
        '--layers',
        nargs='+',
        type=block,
        default=[-1],
        help="blocks, such as layer4.1, a stage, an index, last_stage or all; the last block's "
        'gates by default',
    )
    spaced.add_argument(
        '--space',
        choices=['logits', 'mask'],
        default='logits',
        help='what of a gate is compared (logits by default, as in the coupling)',
    )
    beside.add_argument(
        '--versus',
        nargs=2,
        action='append',
        default=[],
        metavar=('CONFIG', 'CHECKPOINT'),
        help='another network beside it; any number of times',
    )
    beside.add_argument('--names', nargs='+', help='of the networks, in the same order')

    def figure(name: str, draw: Draw, what: str, *parents: argparse.ArgumentParser) -> Any:
        sub = commands.add_parser(name, parents=parents, help=what)
        sub.set_defaults(draw=draw)
        return sub

    sub = figure(
        'embedding', _embedding, 'UMAP of features and gates', common, layered, spaced, beside
    )
    sub.add_argument(
        '--frames', action='store_true', help='of all epochs saved beside the checkpoint'
    )
    sub.add_argument('--color-by', help='a class: pictures with and without it')
    figure('frequency', _frequency, 'how often channels are executed, by class', common, layered)
    sub = figure('neighbors', _neighbors, 'pictures with similar gates', common, layered, spaced)
    sub.add_argument(
        '--query',
        nargs='+',
        metavar='PICTURE',
        help='pictures by number, the rows of the tables, or by file; one of each of five classes '
        'by default',
    )
    sub = figure(
        'alignment', _alignment, 'NMI and neighbor overlap, by layer', common, spaced, beside
    )
    sub.add_argument('--neighbors', type=int, default=10, help='of the overlap, 10 by default')
    figure('cost', _cost, 'executed MACs by picture', common)
    sub = figure('training', _training, 'curves of one or more runs')
    sub.add_argument('work_dirs', nargs='+', help='folders that tools/train.py wrote to')
    sub.add_argument('--names', nargs='+', help='of the runs, in the same order')
    sub.add_argument('--out-dir', help="where to write (default: the first one's analysis/)")


def run(args: argparse.Namespace) -> None:
    from ..files import check_folder

    first = Path(args.work_dirs[0]) if args.figure == 'training' else Path(args.checkpoint).parent
    out_dir = Path(args.out_dir) if args.out_dir else first / 'analysis'
    check_folder(out_dir, '--out-dir')
    for path in args.draw(args, out_dir):
        print(path)


def _gates(
    args: argparse.Namespace, config: Optional[str] = None, checkpoint: Optional[str] = None
) -> tuple[Config, GateTable]:
    """The config of a network, the command's own by default, and what its gates do."""
    from ..analysis.gather import gather
    from .config import load_config

    given = argparse.Namespace(config=config or args.config, cfg_options=args.cfg_options)
    cfg, checkpoint = load_config(given), checkpoint or args.checkpoint
    cache = Path(checkpoint).parent / 'analysis' / 'cache'
    table = gather(cfg, checkpoint, args.split, args.max_images, cache, not args.no_cache)
    return cfg, table


def _embedding(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.embedding import analyze_embedding
    from ..analysis.gather import local_file
    from ..analysis.selection import saved_epochs

    if args.frames and args.versus:
        raise UsageError('--frames and --versus both fill the columns; give one of them')
    if args.versus:
        frames = _networks(args)
    else:
        last = Path(local_file(args.checkpoint))
        paths = saved_epochs(last) if args.frames else [last]
        frames = {p.stem.replace('_', ' '): _gates(args, checkpoint=str(p))[1] for p in paths}
    layers = list(frames.values())[-1].choose(args.layers, '--layers')
    return analyze_embedding(frames, layers, out_dir, args.space, args.color_by, args.frames)


def _frequency(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.frequency import analyze_frequency

    _, table = _gates(args)
    return analyze_frequency(table, table.choose(args.layers, '--layers'), out_dir)


def _neighbors(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.nearest_pictures import analyze_neighbors
    from ..analysis.selection import find_picture
    from ..analysis.thumbnails import Thumbnails

    cfg, table = _gates(args)
    layers = table.choose(args.layers, '--layers')
    queries = None if args.query is None else [find_picture(table, item) for item in args.query]
    return analyze_neighbors(table, layers, Thumbnails(cfg, table), out_dir, queries, args.space)


def _alignment(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.alignment import analyze_alignment

    if args.neighbors < 1:
        raise UsageError(f'--neighbors {args.neighbors} must be 1 or more')
    return analyze_alignment(_networks(args), out_dir, args.space, args.neighbors)


def _networks(args: argparse.Namespace) -> dict[str, GateTable]:
    """The network of the command and those of ``--versus``."""
    from ..analysis.selection import run_names

    pairs = [(args.config, args.checkpoint), *args.versus]
    names = run_names(args.names, [Path(checkpoint).resolve() for _, checkpoint in pairs])
    return {name: _gates(args, *pair)[1] for name, pair in zip(names, pairs, strict=True)}


def _cost(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.cost import analyze_cost
    from ..analysis.thumbnails import Thumbnails

    cfg, table = _gates(args)
    return analyze_cost(table, Thumbnails(cfg, table), out_dir)


def _training(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.selection import run_names
    from ..analysis.training import analyze_training

    folders = [Path(folder) for folder in args.work_dirs]
    names = run_names(args.names, [folder.resolve() / 'x' for folder in folders])
    return analyze_training(dict(zip(names, folders, strict=True)), out_dir)
