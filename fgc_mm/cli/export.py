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
    parser.add_argument('--count', type=int, default=4, help='how many pictures to check with')
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
    for what, difference in result.checks.items():
        row('Checked', f'{what}: largest difference from PyTorch {difference:.2g}')
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
    if args.count < 1:
        raise UsageError(f'--count {args.count} must be at least 1')
    cfg = load_config(args)
    checkpoint = existing(args.checkpoint)
    for given in (args.config, checkpoint, *(args.image or ())):
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
    )
    write_files({out: result.content})
    print_report(result, args)
    print(f'{"Written":<14}{out} ({out.stat().st_size / 2**20:.1f} MiB)')
