# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Run a trained network on pictures: results drawn, executed MACs of each picture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .arguments import add_checkpoint, add_config

SUBJECT = 'the pictures cannot be run'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument('pictures', help='picture, or folder with pictures directly in it')
    parser.add_argument(
        '--out-dir', help='drawn pictures, macs.csv, macs.json; work_dirs/<config>/infer by default'
    )
    parser.add_argument('--device', help='cpu, cuda:0, ...; the best there is by default')


def print_table(rows: list) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from ..evaluation import pictures

    table = Table()
    titles = ('picture', 'saved', 'executed', 'dense', 'executed', 'dense')
    notes = ('', '% of backbone', 'backbone, G', 'backbone, G', 'model, G', 'model, G')
    for title, note in zip(titles, notes, strict=True):
        table.add_column(f'{title}\n{note}', justify='right' if note else 'left', no_wrap=True)
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


def run(args: argparse.Namespace) -> None:
    from ..evaluation import pictures
    from ..files import check_folder
    from ..runtime.checkpoints.file import existing
    from .config import load_config

    cfg = load_config(args)
    existing(args.checkpoint)
    out_dir = args.out_dir or os.path.join('work_dirs', Path(args.config).stem, 'infer')
    check_folder(out_dir, '--out-dir')
    found = pictures.find_pictures(args.pictures)
    results = list(pictures.infer(cfg, args.checkpoint, found, out_dir, args.device))
    rows = pictures.macs_rows(results)
    print_table([*rows, pictures.all_pictures(rows)])
    pictures.write_rows(rows, out_dir)
    print(f'{out_dir}: pictures in vis/, figures in macs.csv and macs.json')
