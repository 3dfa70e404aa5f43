# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Picture and table of benchmarks/speed.py: time saved against MACs saved."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fgc_mm.analysis import style

COLORS = {
    'static': '0.45',
    'sparse': style.RUNS[0],
}
HEAD = (
    'network',
    'pictures',
    'batch',
    'open',
    'MACs',
    'static: time',
    'realized',
    'sparse: time',
    'realized',
    'sparse / static',
)


def draw(rows: list[dict], path: Path) -> None:
    """Draw the figures of a run, as ``.png`` and as ``.svg``.

    Args:
        rows (list[dict]): As ``benchmarks/speed.py`` writes them.
        path (Path): The picture to write, with one of the two endings.
    """
    style.save(figure(rows), path.with_suffix(''))


def figure(rows: list[dict]) -> Figure:
    """Time saved against MACs saved, a panel for each batch size.

    Args:
        rows (list[dict]): As ``benchmarks/speed.py`` writes them.
    """
    batches = sorted({row['batch'] for row in rows})
    networks = dict.fromkeys(row['network'] for row in rows)
    markers = dict(zip(networks, style.MARKERS, strict=False))
    # Gates cost time, too: what is slower than dense lies below zero.
    lowest = min(-0.05, *(1 - row['time_ratio'] for row in rows))
    with style.figure(5 * len(batches), 4.5) as drawn:
        axes = drawn.subplots(1, len(batches), squeeze=False, sharey=True)[0]
        for axis, batch in zip(axes, batches, strict=True):
            axis.plot([0, 1], [0, 1], color='0.8', zorder=0)
            axis.axhline(0, color='0.8', linewidth=0.8, zorder=0)
            for kind, color in COLORS.items():
                for row in rows:
                    if (row['kind'], row['batch']) == (kind, batch):
                        saved = 1 - row['macs_ratio'], 1 - row['time_ratio']
                        axis.scatter(*saved, color=color, marker=markers[row['network']], s=30)
                axis.scatter([], [], color=color, label=kind)
            for network, marker in markers.items():
                axis.scatter([], [], color='0.3', marker=marker, label=network)
            axis.set_title(f'batch {batch}')
            axis.set_xlabel('MACs saved, share of dense')
            axis.set_xlim(-0.03, 1)
            axis.set_ylim(lowest - 0.05, 1)
        axes[0].set_ylabel('time saved, share of dense')
        axes[0].legend(loc='upper left')
    return drawn


def table(rows: list[dict]) -> str:
    """The figures as a Markdown table, one line for each setting.

    Args:
        rows (list[dict]): As ``benchmarks/speed.py`` writes them.
    """
    settings: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = row['network'], row['size'], row['batch'], row['open_share']
        settings.setdefault(key, {})[row['kind']] = row
    lines = [HEAD, ('---',) * len(HEAD)]
    for (network, size, batch, share), kinds in settings.items():
        if 'static' not in kinds or 'sparse' not in kinds:
            continue  # nothing to compare
        static, sparse = kinds['static'], kinds['sparse']
        lines.append(
            (
                network,
                size,
                str(batch),
                f'{100 * share:.0f} %',
                f'{sparse["macs_ratio"]:.2f}',
                f'{static["time_ratio"]:.2f}',
                _percent(static['realized']),
                f'{sparse["time_ratio"]:.2f}',
                _percent(sparse['realized']),
                _percent(_of_limit(sparse, static)),
            )
        )
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def _of_limit(sparse: dict, static: dict) -> float:
    """What the sparse network saves of what a static one does; nan where that is nothing."""
    saved = 1 - static['time_ratio']
    return (1 - sparse['time_ratio']) / saved if saved > 0.02 else float('nan')


def _percent(share: float) -> str:
    return '' if share != share else f'{100 * share:.0f} %'
