# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Figures of what the gates of a trained network do, with the tables behind them."""

import fgc_mm  # noqa: F401  registers gates, backbones and hooks
from fgc_mm.analysis.commands import build_parser, execute
from fgc_mm.engine import launch


def main() -> None:
    for path in execute(build_parser(__doc__).parse_args()):
        print(path)


if __name__ == '__main__':
    launch.run(main, 'the figures cannot be made')
