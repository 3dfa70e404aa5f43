# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Show where the channels of a network can be switched, and why not elsewhere.

Works for any config, gated or not: what gates would read, which layers they would switch, and the
share of the computation that is.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .arguments import add_config

if TYPE_CHECKING:
    from ..sites import Found, Site

SUBJECT = 'the sites cannot be shown'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, 'config file of any model')
    parser.add_argument(
        '--part',
        nargs='+',
        default=['backbone'],
        help='parts of the model to look at, such as backbone neck bbox_head (default: backbone)',
    )
    parser.add_argument(
        '--example',
        nargs=2,
        type=int,
        metavar=('H', 'W'),
        default=(224, 224),
        help='height and width of the picture it is tried on (default: 224 224)',
    )


def run(args: argparse.Namespace) -> None:
    import torch

    from ..errors import UsageError
    from ..gates import find_gates
    from ..macs import layer_macs
    from ..sites import Gates, find_sites
    from ..sites.find import find_in_model
    from ..sites.forward_hooks import remove_gates
    from ..sites.parts import check_parts, in_part
    from ..tasks import task_of_model
    from .config import load_config

    if min(args.example) < 1:
        raise UsageError(f'--example {args.example[0]} {args.example[1]} must be at least 1 each')
    model = build_model(load_config(args))
    check_parts(model, args.part)
    gates = {
        name.replace('.gates.', '.', 1) for name in find_gates(model)
    }  # by the names of sites, with - for .
    for name, module in [*model.named_modules()]:
        if isinstance(module, Gates):
            remove_gates(model.get_submodule(name.rpartition('.')[0]))
    height, width = args.example
    channels = first_channels(model)
    shape = (channels, height, width)
    if args.part == ['backbone']:
        found = {'backbone': find_sites(model.backbone, torch.zeros(1, *shape))}
        picture = torch.zeros(1, *shape)
        model.eval()  # what that of a backbone returns may be None
        inner = layer_macs(model.backbone, picture)
        macs = {f'backbone.{name}': count for name, count in inner.items()}
    else:
        whole = find_in_model(model, shape)
        found = {part: in_part(whole, part) for part in args.part}
        generator = torch.Generator().manual_seed(0)
        picture = torch.rand(1, *shape, generator=generator)
        samples = task_of_model(model).made_up(model, 1, height, width)
        model.eval()
        macs = layer_macs(model, picture, samples, mode='predict')
    for part, mine in found.items():
        print_part(model, part, mine, macs, gates)
    print(f'\nMACs are those of one picture of {height} x {width}; gates cost a little on top.')
    if len(found) > 1:
        print_whole(model, found, macs)


def build_model(cfg: Any) -> Any:
    """The model of a config, without its weights."""
    from mmengine.registry import MODELS, init_default_scope

    from ..runtime.config.check import check_config
    from ..runtime.messages import explained

    with explained('the config cannot be built'):
        init_default_scope(cfg.get('default_scope') or 'mmengine')
        check_config(cfg, ())
        model = copy.deepcopy(cfg.model)
        if cfg.get('data_preprocessor') is not None:
            model.setdefault('data_preprocessor', cfg.data_preprocessor)
        return MODELS.build(model)


def first_channels(model: Any) -> int:
    """Channels of the pictures that the first layer of a model reads."""
    from ..macs.switches import widths
    from ..sites.layers import is_layer

    layer = next((m for m in model.modules() if is_layer(m)), None)
    return widths(layer)[0] if layer is not None else 3


def print_part(model: Any, part: str, found: Found, macs: dict, gates: set[str]) -> None:
    """The sites of a part, and the layers that are none."""
    from ..macs import share_touched
    from ..sites.gate import stem_of

    network = model.get_submodule(part)
    own = inside(macs, part)
    stem = stem_of(network, found) if found.first else []
    notes = {site.name: 'stem' for site in found.sites if site.name in stem}
    notes.update(
        {s.name: 'gated' for s in found.sites if f'{part}.{s.name.replace(".", "-")}' in gates}
    )
    print(f'\n{part} ({type(network).__name__}), {len(found.sites)} sites\n')
    if found.sites:
        rows = [
            (
                site.name,
                site.source or part,
                ', '.join(end.module for end in site.consumers),
                str(site.channels) + (f' x {site.calls} calls' if site.calls > 1 else ''),
                percent(share_touched([site], network, own)),
                notes.get(site.name, ''),
            )
            for site in found.sites
        ]
        head = ('site', 'the gate reads the input of', 'consumers', 'channels', 'MACs', '')
        print(table(head, rows))
    if found.refused:
        total = sum(own.values()) or 1
        print(f'\nno sites: {len(found.refused)} layers\n')
        others = [(r.name, percent(own.get(r.name, 0) / total), r.reason) for r in found.refused]
        print(table(('layer', 'MACs', 'why'), others))
    print('\n' + totals(f'all {len(found.sites)} sites', found.sites, network, own, part))
    gated = [site for site in found.sites if notes.get(site.name) == 'gated']
    if gated:
        print(totals(f'the {len(gated)} with gates', gated, network, own, part))


def print_whole(model: Any, found: dict[str, Found], macs: dict[str, int]) -> None:
    """What all parts together come to in the model."""
    from ..macs import share_left, share_touched

    touched, left = 0.0, 1.0
    total = sum(macs.values()) or 1
    for part, mine in found.items():
        own = inside(macs, part)
        weight = sum(own.values()) / total
        network = model.get_submodule(part)
        touched += weight * share_touched(mine.sites, network, own)
        left -= weight * (1 - share_left(mine.sites, network, own))
    number = sum(len(mine.sites) for mine in found.values())
    print(
        f'{type(model).__name__}: {number} sites touch {percent(touched)} of its MACs '
        f'({total / 1e9:.3g} G); {percent(left)} are left if every site is half open.'
    )


def totals(what: str, sites: Sequence[Site], network: Any, macs: dict[str, int], part: str) -> str:
    """How much of a part some sites touch."""
    from ..macs import share_left, share_touched

    touched = percent(share_touched(sites, network, macs))
    left = percent(share_left(sites, network, macs))
    return (
        f'{part}: {what} have {sum(site.channels for site in sites)} channels and touch {touched} '
        f'of its MACs ({sum(macs.values()) / 1e9:.3g} G); {left} are left if each is half open.'
    )


def inside(macs: dict[str, int], part: str) -> dict[str, int]:
    """The layers of a part, with names as they are seen from it."""
    start = f'{part}.'
    return {name[len(start) :]: n for name, n in macs.items() if name.startswith(start)}


def percent(share: float) -> str:
    """A share in percent."""
    return f'{100 * share:.1f} %'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the last one as long as it is."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ['-' * width for width in widths], *rows]
    return '\n'.join(
        '  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
