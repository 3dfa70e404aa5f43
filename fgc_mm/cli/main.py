# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
# PYTHON_ARGCOMPLETE_OK
"""The command ``fgc``: one module a subcommand, imported when it is needed."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Optional

COMMANDS = {
    'train': 'train',
    'test': 'test',
    'infer': 'infer',
    'slim': 'slim',
    'export': 'export',
    'analyze': 'analyze',
    'report': 'report',
    'convert': 'convert',
    'publish': 'publish',
    'demo-data': 'demo_data',
}


def command(name: str) -> ModuleType:
    """The module of a subcommand: ``add_arguments(parser)``, ``run(args)`` and ``SUBJECT``."""
    return importlib.import_module(f'.{COMMANDS[name]}', __package__)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    from ..versions import __version__

    parser = argparse.ArgumentParser(
        prog='fgc',
        description='Gated networks for OpenMMLab: train, test, slim, export and look at them.',
    )
    parser.add_argument('--version', action='version', version=f'fgc_mm {__version__}')
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name in COMMANDS:
        module = command(name)
        what, _, _more = (module.__doc__ or '').partition('\n')
        sub = commands.add_parser(name, help=what[0].lower() + what[1:].rstrip('.'))
        sub.description = module.__doc__
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(sub)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a subcommand and end the process.

    Args:
        argv (Sequence[str], optional): Its name and arguments. Defaults to None, those
            of the process.
    """
    parser = build_parser()
    try:
        import argcomplete
    except ImportError:  # no completion in the shell then
        pass
    else:
        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    module = command(args.command)

    import fgc_mm

    from .run import run

    fgc_mm.register()
    run(lambda: module.run(args), module.SUBJECT, trust=getattr(args, 'trust_checkpoint', False))


def run_tool(name: str) -> None:
    """What ``tools/NAME.py`` does: the subcommand of that name, with the arguments it was given."""
    main([name, *sys.argv[1:]])
