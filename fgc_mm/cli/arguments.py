# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Arguments that several commands share. Nothing heavy is imported here: help is quick."""

from __future__ import annotations

import argparse
import re
from typing import Any, Union

TRUST = '--trust-checkpoint'


class CfgOptions(argparse.Action):
    """Collects ``KEY=VALUE``; :func:`fgc_mm.cli.config.load_config` reads the values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: Any = None,
    ) -> None:
        for pair in values or ():
            key, equals, _ = pair.partition('=')
            if not equals or not key or not all(key.split('.')):
                parser.error(
                    f'{option_string} {pair}: write KEY=VALUE, as in model.backbone.depth=18'
                )
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *values])


def block(text: str) -> Union[str, int]:
    """A block by its name, or by its index."""
    return int(text) if re.fullmatch(r'-?\d+', text) else text


def add_config(parser: argparse.ArgumentParser, help_text: str = 'config file') -> None:
    """The config, and ``--cfg-options`` that change it."""
    parser.add_argument('config', help=help_text)
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        help='override settings of the config, as key=value; lists as key="[a,b]" or key=a,b',
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, and the way to load one that could run code, see docs/security.md."""
    parser.add_argument('checkpoint', help='checkpoint file')
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The way to load checkpoints that could run code."""
    parser.add_argument(
        TRUST,
        action='store_true',
        help='load checkpoints as they are, even if that runs code in them',
    )


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """The work dir and the job launcher of training and testing, as OpenMMLab users know them."""
    parser.add_argument('--work-dir', help='where logs, checkpoints and results go')
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='job launcher; without a GPU the processes talk through gloo',
    )
    # torch.distributed.launch hands the local rank over as an argument.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
