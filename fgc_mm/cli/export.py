# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Export a network with its gates to ONNX, TorchScript or torch.export, checked on pictures.

Nothing is written unless the exported network agrees with PyTorch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_checkpoint, add_config

SUBJECT = 'the network cannot be exported'
# As in fgc_mm.inference, which is not imported for help; a test compares them.
PARTS = ('model', 'backbone')
MOST = 8  # pictures that have a line each
FORMATS = ('onnx', 'torchscript', 'torch_export')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, 'config file of a model')
    add_checkpoint(parser)
    parser.add_argument('--out', required=True, help='file to write, such as model.onnx')
    parser.add_argument(
        '--part', choices=PARTS, default='model', help='all that exports, or the backbone alone'
    )
    parser.add_argument('--format', choices=FORMATS, default='onnx', help='file format')
    parser.add_argument('--with-gates', action='store_true', help='masks of the gates as outputs')
    parser.add_argument(
        '--with-preprocess', action='store_true', help='channel order, mean, std and padding inside'
    )
    parser.add_argument(
        '--fixed-size', action='store_true', help='only images of the size of the first one checked'
    )
    parser.add_argument('--opset', type=int, default=17, help="version of ONNX's operators")
    parser.add_argument(
        '--image', nargs='+', help='pictures or folders to check with, not the test set'
    )
    parser.add_argument(
        '--count', type=int, help='how many pictures to check with (default: 4, with --int8 64)'
    )
    parser.add_argument(
        '--int8', action='store_true', help='quantize to int8, with pictures of the training set'
    )
    parser.add_argument(
        '--calibrate', nargs='+', help='pictures or folders to quantize with in their place'
    )
    parser.add_argument(
        '--calibrate-count', type=int, default=64, help='how many pictures to quantize with'
    )
    parser.add_argument('--work-dir', help='where logs go')


def print_report(result: Any, args: argparse.Namespace) -> None:
    def row(title: str, text: str) -> None:
        print(f'{title:<14}{text}')

    meta = result.metadata
    row('Exported', f'{meta["part"]}, {args.format}, {meta["gates"]} gates inside')
    free = ', '.join(result.dynamic) or 'nothing'
    row('Input', f'image, 1 x 3 x height x width; may change: {free}')
    for name, shape in result.outputs.items():
        row('Output', f'{name}  {" x ".join(map(str, shape))}')
    checks = dict(result.checks)
    pictures = [what for what in checks if what.startswith('picture ')]
    if len(pictures) > MOST:
        checks = {f'{len(pictures)} pictures': max(map(checks.pop, pictures)), **checks}
    for what, difference in checks.items():
        row('Checked', f'{what}: largest difference from PyTorch {difference:.2g}')
    if result.int8:
        for name, value in result.int8.items():
            what = 'difference from float32' if name != 'same_class' else 'as in float32'
            row('Int8', f'{name}: {100 * value:.3g} % {what}, on pictures it was not calibrated on')
    dense, executed = (float(meta[f'macs_backbone_{kind}']) for kind in ('dense', 'executed'))
    row('Backbone', f'{dense / 1e9:.4g} G MACs dense, {executed / 1e9:.4g} G open, mean of these')
    for notice in result.notices:
        row('Note', notice)


def run(args: argparse.Namespace) -> None:
    from ..errors import UsageError
    from ..files import check_file, write_files
    from ..inference import export_checkpoint
    from ..runtime import launch
    from ..runtime.checkpoints.file import existing
    from ..versions import __version__
    from .config import load_config

    out = Path(args.out)
    if not out.parent.is_dir():
        raise UsageError(f'--out {out}: the folder {out.parent} does not exist')
    check_file(out, '--out')
    if args.count is None:
        args.count = 64 if args.int8 else 4
    for option in ('count', 'calibrate_count'):
        if getattr(args, option) < 1:
            name = option.replace('_', '-')
            raise UsageError(f'--{name} {getattr(args, option)} must be at least 1')
    if args.calibrate and not args.int8:
        raise UsageError('--calibrate is for --int8')
    cfg = load_config(args)
    checkpoint = existing(args.checkpoint)
    for given in (args.config, checkpoint, *(args.image or ()), *(args.calibrate or ())):
        # A picture may also be named by its folder.
        if out.exists() and out.resolve().is_relative_to(Path(given).resolve()):
            raise UsageError(f'--out {out} would replace what is read from {given}')
    launch.prepare(cfg, splits=() if args.image else ('test',))
    runner = launch.build_runner(cfg)
    result = export_checkpoint(
        cfg,
        runner,
        checkpoint,
        args.image,
        args.count,
        part=args.part,
        file_format=args.format,
        with_gates=args.with_gates,
        with_preprocess=args.with_preprocess,
        fixed_size=args.fixed_size,
        opset=args.opset,
        metadata=dict(config=Path(args.config).name, fgc_mm=__version__),
        int8=args.calibrate_count if args.int8 else 0,
        calibrate=args.calibrate,
    )
    write_files({out: result.content})
    print_report(result, args)
    print(f'{"Written":<14}{out} ({out.stat().st_size / 2**20:.1f} MiB)')
