# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The subcommands of tools/analyze.py."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional, Union

from mmengine.config import Config

from ..engine import launch
from ..engine.launch import UsageError
from .alignment import analyze_alignment
from .cost import analyze_cost
from .embedding import analyze_embedding
from .extra import MissingExtraError
from .frequency import analyze_frequency
from .gate_table import GateTable
from .gather import gather, local_file
from .neighbours import analyze_neighbours
from .thumbnails import Thumbnails
from .training import analyze_training


def build_parser(description: Optional[str] = None) -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(description=description)
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
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
    sub.add_argument('--colour-by', help='a class: pictures with and without it')
    sub.set_defaults(run=_embedding)
    sub = commands.add_parser(
        'frequency', parents=[common, layered], help='how often channels are executed, by class'
    )
    sub.set_defaults(run=_frequency)
    sub = commands.add_parser(
        'neighbours', parents=[common, layered, spaced], help='pictures with similar gates'
    )
    sub.add_argument(
        '--query',
        nargs='+',
        metavar='PICTURE',
        help='pictures by number, the rows of the tables, or by file; one of each of five classes '
        'by default',
    )
    sub.set_defaults(run=_neighbours)
    sub = commands.add_parser(
        'alignment', parents=[common, spaced, beside], help='NMI and neighbour overlap, by layer'
    )
    sub.add_argument('--neighbours', type=int, default=10, help='of the overlap, 10 by default')
    sub.set_defaults(run=_alignment)
    sub = commands.add_parser('cost', parents=[common], help='executed MACs by picture')
    sub.set_defaults(run=_cost)
    sub = commands.add_parser('training', help='curves of one or more runs')
    sub.add_argument('work_dirs', nargs='+', help='folders that tools/train.py wrote to')
    sub.add_argument('--names', nargs='+', help='of the runs, in the same order')
    sub.add_argument('--out-dir', help="where to write (default: the first one's analysis/)")
    sub.set_defaults(run=_training)
    return parser


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument('config', help='config file of a model with gates')
    common.add_argument('checkpoint', help='checkpoint file')
    common.add_argument('--out-dir', help='where to write (default: analysis/ beside it)')
    common.add_argument('--split', choices=['val', 'test'], default='test')
    common.add_argument(
        '--max-images', type=int, help='take that many pictures, evenly spread over the split'
    )
    common.add_argument('--no-cache', action='store_true', help='run the network again')
    common.add_argument(
        '--cfg-options', nargs='+', action=launch.CfgOptions, help='override settings of the config'
    )
    launch.add_trust_argument(common)
    return common


def execute(args: argparse.Namespace) -> list[Path]:
    """Run a subcommand.

    Args:
        args (Namespace): What :func:`build_parser`'s parser returned.

    Returns:
        list[Path]: The files it wrote.
    """
    run: Callable[[argparse.Namespace, Path], list[Path]] = args.run
    first = Path(args.work_dirs[0]) if args.command == 'training' else Path(args.checkpoint).parent
    out_dir = Path(args.out_dir) if args.out_dir else first / 'analysis'
    launch.check_folder(out_dir, '--out-dir')
    try:
        return run(args, out_dir)
    except MissingExtraError as error:
        raise UsageError(str(error)) from error


def _read(args: argparse.Namespace, config: Optional[str] = None) -> Config:
    cfg = launch.read_config(config or args.config)
    if 'model' not in cfg:
        raise UsageError(
            f'config {config or args.config} has no `model`: it is a fragment for `_base_`'
        )
    launch.merge_options(cfg, args.cfg_options)
    cfg.launcher = 'none'
    return cfg


def _gates(args: argparse.Namespace, cfg: Config, checkpoint: str) -> GateTable:
    cache = Path(checkpoint).parent / 'analysis' / 'cache'
    return gather(cfg, checkpoint, args.split, args.max_images, cache, not args.no_cache)


def choose_layers(table: GateTable, wanted: Optional[Sequence[str]]) -> list[str]:
    """The gates that ``--layers`` names, those of the last block by default."""
    items: list[Union[str, int]] = [
        int(item) if re.fullmatch(r'-?\d+', item) else item for item in wanted or ['-1']
    ]
    try:
        return table.choose(items)
    except ValueError as error:
        raise UsageError(f'--{error}') from None


def _embedding(args: argparse.Namespace, out_dir: Path) -> list[Path]:
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
        frames, layers, out_dir, args.space, colour_by=args.colour_by, chained=args.frames
    )


def saved_epochs(checkpoint: Path) -> list[Path]:
    """The checkpoints of a training up to this one, in order."""

    def step(path: Path) -> int:
        found = re.search(r'_(\d+)$', path.stem)
        return int(found.group(1)) if found else -1

    kind = checkpoint.stem.rpartition('_')[0]
    others = checkpoint.parent.glob(f'{kind}_*.pth') if kind and step(checkpoint) >= 0 else []
    found = {path for path in others if 0 <= step(path) < step(checkpoint)}
    return [*sorted(found, key=step), checkpoint]


def _frequency(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    table = _gates(args, _read(args), args.checkpoint)
    return analyze_frequency(table, choose_layers(table, args.layers), out_dir)


def _neighbours(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    cfg = _read(args)
    table = _gates(args, cfg, args.checkpoint)
    layers = choose_layers(table, args.layers)
    queries = None if args.query is None else [find_picture(table, item) for item in args.query]
    pictures = Thumbnails(cfg, table)
    return analyze_neighbours(table, layers, pictures, out_dir, queries, args.space)


def find_picture(table: GateTable, wanted: str) -> int:
    """The row of the picture that ``--query`` names, by its number or its file."""
    if re.fullmatch(r'-?\d+', wanted):
        return int(wanted)
    found = [n for n, path in enumerate(table.paths) if path and Path(path).match(wanted)]
    if len(found) != 1:
        way = (
            f'or by its file ({len(found)} have this one)'
            if any(table.paths)
            else 'no file is known'
        )
        raise UsageError(
            f'--query {wanted}: name a picture by its number, 0 to {len(table) - 1}, {way}'
        )
    return found[0]


def _alignment(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    if args.neighbours < 1:
        raise UsageError(f'--neighbours {args.neighbours} must be 1 or more')
    return analyze_alignment(_networks(args), out_dir, args.space, args.neighbours)


def _networks(args: argparse.Namespace) -> dict[str, GateTable]:
    """The network of the command and those of ``--versus``."""
    pairs = [(args.config, args.checkpoint), *args.versus]
    names = run_names(args.names, [Path(checkpoint).resolve() for _, checkpoint in pairs])
    return {
        name: _gates(args, _read(args, config), checkpoint)
        for name, (config, checkpoint) in zip(names, pairs, strict=True)
    }


def run_names(given: Optional[Sequence[str]], paths: Sequence[Path]) -> list[str]:
    """Names of runs: as given, else of their folders, or of their files in a common one."""
    if given is not None:
        if len(given) != len(paths) or len(set(given)) != len(given):
            many = f'{len(paths)} different names' if len(paths) > 1 else 'one name'
            raise UsageError(f'--names {" ".join(given)} must be {many}')
        return list(given)
    deepest = max(len(p.parent.parts) for p in paths)
    longer = (['/'.join(p.parent.parts[-n:]) for p in paths] for n in range(2, deepest + 1))
    shorter = [p.stem if len({p.parent for p in paths}) == 1 else p.parent.name for p in paths]
    for choice in (shorter, *longer):
        if len(set(choice)) == len(paths) and '' not in choice:
            return choice
    return [f'{number}: {path.stem}' for number, path in enumerate(paths, 1)]


def _cost(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    cfg = _read(args)
    table = _gates(args, cfg, args.checkpoint)
    return analyze_cost(table, Thumbnails(cfg, table), out_dir)


def _training(args: argparse.Namespace, out_dir: Path) -> list[Path]:
    folders = [Path(folder) for folder in args.work_dirs]
    names = run_names(args.names, [folder.resolve() / 'x' for folder in folders])
    return analyze_training(dict(zip(names, folders, strict=True)), out_dir)
