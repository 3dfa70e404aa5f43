# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Draw figures of what the gates of a trained network do, with the tables behind them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..errors import UsageError
from .arguments import add_checkpoint, add_config

if TYPE_CHECKING:
    from mmengine.config import Config

    from ..analysis.gate_table import GateTable

SUBJECT = 'the figures cannot be made'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest='figure', required=True, metavar='FIGURE')
    common = _common()
    layered = argparse.ArgumentParser(add_help=False)
    layered.add_argument(
        '--layers',
        nargs='+',
        help="blocks, such as layer4.1, a stage, an index, last_stage or all; the last block's "
        'gates by default',
    )
    spaced = argparse.ArgumentParser(add_help=False)
    spaced.add_argument(
        '--space',
        choices=['logits', 'mask'],
        default='logits',
        help='what of a gate is compared (logits by default, as in the coupling)',
    )

    beside = argparse.ArgumentParser(add_help=False)
    beside.add_argument(
        '--versus',
        nargs=2,
        action='append',
        default=[],
        metavar=('CONFIG', 'CHECKPOINT'),
        help='another network beside it; any number of times',
    )
    beside.add_argument('--names', nargs='+', help='of the networks, in the same order')

    sub = commands.add_parser(
        'embedding', parents=[common, layered, spaced, beside], help='UMAP of features and gates'
    )
    sub.add_argument(
        '--frames', action='store_true', help='of all epochs saved beside the checkpoint'
    )
    sub.add_argument('--color-by', help='a class: pictures with and without it')
    sub.set_defaults(draw=_embedding)
    sub = commands.add_parser(
        'frequency', parents=[common, layered], help='how often channels are executed, by class'
    )
    sub.set_defaults(draw=_frequency)
    sub = commands.add_parser(
        'neighbors', parents=[common, layered, spaced], help='pictures with similar gates'
    )
    sub.add_argument(
        '--query',
        nargs='+',
        metavar='PICTURE',
        help='pictures by number, the rows of the tables, or by file; one of each of five classes '
        'by default',
    )
    sub.set_defaults(draw=_neighbors)
    sub = commands.add_parser(
        'alignment', parents=[common, spaced, beside], help='NMI and neighbor overlap, by layer'
    )
    sub.add_argument('--neighbors', type=int, default=10, help='of the overlap, 10 by default')
    sub.set_defaults(draw=_alignment)
    sub = commands.add_parser('cost', parents=[common], help='executed MACs by picture')
    sub.set_defaults(draw=_cost)
    sub = commands.add_parser('training', help='curves of one or more runs')
    sub.add_argument('work_dirs', nargs='+', help='folders that tools/train.py wrote to')
    sub.add_argument('--names', nargs='+', help='of the runs, in the same order')
    sub.add_argument('--out-dir', help="where to write (default: the first one's analysis/)")
    sub.set_defaults(draw=_training)


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    add_config(common, 'config file of a model with gates')
    add_checkpoint(common)
    common.add_argument('--out-dir', help='where to write (default: analysis/ beside it)')
    common.add_argument('--split', choices=['val', 'test'], default='test')
    common.add_argument(
        '--max-images', type=int, help='take that many pictures, evenly spread over the split'
    )
    common.add_argument('--no-cache', action='store_true', help='run the network again')
    return common


def run(args: argparse.Namespace) -> None:
    from ..files import check_folder

    first = Path(args.work_dirs[0]) if args.figure == 'training' else Path(args.checkpoint).parent
    out_dir = Path(args.out_dir) if args.out_dir else first / 'analysis'
    check_folder(out_dir, '--out-dir')
    for path in args.draw(args, out_dir):
        print(path)


def _read(args: argparse.Namespace, config: Optional[str] = None) -> Config:
    from .config import load_config

    given = argparse.Namespace(config=config or args.config, cfg_options=args.cfg_options)
    return load_config(given)


def _gates(args: argparse.Namespace, cfg: Config, checkpoint: str) -> GateTable:
    from ..analysis.gather import gather

    cache = Path(checkpoint).parent / 'analysis' / 'cache'
    return gather(cfg, checkpoint, args.split, args.max_images, cache, not args.no_cache)


def _embedding(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.embedding import analyze_embedding
    from ..analysis.gather import local_file
    from ..analysis.selection import choose_layers, saved_epochs

    if args.frames and args.versus:
        raise UsageError('--frames and --versus both fill the columns; give one of them')
    if args.versus:
        frames = _networks(args)
    else:
        cfg, last = _read(args), Path(local_file(args.checkpoint))
        checkpoints = saved_epochs(last) if args.frames else [last]
        frames = {path.stem.replace('_', ' '): _gates(args, cfg, str(path)) for path in checkpoints}
    layers = choose_layers(list(frames.values())[-1], args.layers)
    return analyze_embedding(
        frames, layers, out_dir, args.space, color_by=args.color_by, chained=args.frames
    )


def _frequency(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.frequency import analyze_frequency
    from ..analysis.selection import choose_layers

    table = _gates(args, _read(args), args.checkpoint)
    return analyze_frequency(table, choose_layers(table, args.layers), out_dir)


def _neighbors(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.nearest_pictures import analyze_neighbors
    from ..analysis.selection import choose_layers, find_picture
    from ..analysis.thumbnails import Thumbnails

    cfg = _read(args)
    table = _gates(args, cfg, args.checkpoint)
    layers = choose_layers(table, args.layers)
    queries = None if args.query is None else [find_picture(table, item) for item in args.query]
    pictures = Thumbnails(cfg, table)
    return analyze_neighbors(table, layers, pictures, out_dir, queries, args.space)


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
    return {
        name: _gates(args, _read(args, config), checkpoint)
        for name, (config, checkpoint) in zip(names, pairs, strict=True)
    }


def _cost(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.cost import analyze_cost
    from ..analysis.thumbnails import Thumbnails

    cfg = _read(args)
    table = _gates(args, cfg, args.checkpoint)
    return analyze_cost(table, Thumbnails(cfg, table), out_dir)


def _training(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    from ..analysis.selection import run_names
    from ..analysis.training import analyze_training

    folders = [Path(folder) for folder in args.work_dirs]
    names = run_names(args.names, [folder.resolve() / 'x' for folder in folders])
    return analyze_training(dict(zip(names, folders, strict=True)), out_dir)
