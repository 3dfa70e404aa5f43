# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
# PYTHON_ARGCOMPLETE_OK
"""The command ``fgc``: one module a subcommand. What takes long to import is left to ``run``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Optional

import argcomplete

COMMANDS = (
    'train',
    'test',
    'infer',
    'sites',
    'gate',
    'slim',
    'export',
    'analyze',
    'report',
    'convert',
    'publish',
    'demo-data',
)


def command(name: str) -> ModuleType:
    """The module of a subcommand: ``add_arguments(parser)``, ``run(args)`` and ``SUBJECT``."""
    return importlib.import_module(f'.{name.replace("-", "_")}', __package__)


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
    """Run a subcommand and end the process."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    argcomplete.autocomplete(parser)
    if argv and not argv[0].startswith('-') and argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, 1)
        hint = f', did you mean {close[0]!r}? There are' if close else ', but'
        parser.error(f'there is no command {argv[0]!r}{hint} {", ".join(COMMANDS)}')
    args = parser.parse_args(argv)
    module = command(args.command)

    import fgc_mm

    from .run import run

    fgc_mm.register()
    run(lambda: module.run(args), module.SUBJECT, trust=getattr(args, 'trust_checkpoint', False))


def run_tool(name: str) -> None:
    """What ``tools/*.py`` do: the subcommand of that name, with the arguments they were given."""
    main([name, *sys.argv[1:]])
