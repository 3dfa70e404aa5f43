# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Run a trained network on pictures: results drawn, executed MACs of each picture."""

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.engine import launch
from fgc_mm.engine.checkpoint_fit import CheckpointMismatchError
from fgc_mm.inference import pictures


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('pictures', help='picture, or folder with pictures directly in it')
    parser.add_argument(
        '--out-dir', help='drawn pictures, macs.csv, macs.json; work_dirs/<config>/infer by default'
    )
    parser.add_argument('--device', help='cpu, cuda:0, ...; the best there is by default')
    parser.add_argument(
        '--cfg-options', nargs='+', action=launch.CfgOptions, help='override settings, as key=value'
    )
    launch.add_trust_argument(parser)
    parser.set_defaults(work_dir=None, launcher='none', local_rank=0)
    return parser.parse_args()


def print_table(rows: list) -> None:
    table = Table()
    titles = ('picture', 'saved', 'executed', 'dense', 'executed', 'dense')
    notes = ('', '% of backbone', 'backbone, G', 'backbone, G', 'model, G', 'model, G')
    for title, note in zip(titles, notes, strict=True):
        justify = 'right' if note else 'left'
        table.add_column(f'{title}\n{note}', justify=justify, no_wrap=True)
    for row in rows:
        _, saved, *macs = (row[name] for name in pictures.COLUMNS)
        name = os.path.basename(row['picture'])
        table.add_row(name, f'{saved:.2f}', *(f'{value:.4g}' for value in macs))
    console = Console()
    # A file, or a narrow window: longer lines are better than cut names.
    console.width = max(
        console.width, Measurement.get(console, console.options.update(width=1000), table).maximum
    )
    console.print(table)


def main() -> None:
    args = parse_args()
    cfg = launch.load_config(args)
    launch.existing(args.checkpoint)
    out_dir = args.out_dir or os.path.join('work_dirs', Path(args.config).stem, 'infer')
    launch.check_folder(out_dir, '--out-dir')
    try:
        found = pictures.find_pictures(args.pictures)
        results = list(pictures.infer(cfg, args.checkpoint, found, out_dir, args.device))
    except (FileNotFoundError, CheckpointMismatchError) as error:
        raise launch.UsageError(str(error)) from error
    rows = pictures.macs_rows(results)
    print_table([*rows, pictures.all_pictures(rows)])
    pictures.write_rows(rows, out_dir)
    print(f'{out_dir}: pictures in vis/, figures in macs.csv and macs.json')


if __name__ == '__main__':
    launch.run(main, 'the pictures cannot be run')
