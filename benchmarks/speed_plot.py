# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Picture and table of benchmarks/speed.py: time saved against MACs saved."""

from __future__ import annotations

from pathlib import Path

# Told apart by people with any kind of colour vision (Okabe and Ito).
COLOURS = {
    'static': '0.45',
    'packed': '#E69F00',
    'packed static': '#009E73',
    'masked': '#D55E00',
    'sparse': '#0072B2',
}
HEAD = (
    'network',
    'pictures',
    'batch',
    'open',
    'MACs',
    'packed: time',
    'masked: time',
    'static: time',
    'realised',
    'sparse: time',
    'realised',
    'sparse / static',
    'packed static: time',
    'sparse / packed static',
)


def draw(rows: list[dict], path: Path) -> None:
    """Draw the figures of a run.

    Args:
        rows (list[dict]): As ``benchmarks/speed.py`` writes them; older files lack
            some kinds.
        path (Path): The picture to write.
    """
    import matplotlib

    matplotlib.use('agg')
    import matplotlib.pyplot as plt

    batches = sorted({row['batch'] for row in rows})
    figure, axes = plt.subplots(
        1, len(batches), figsize=(5 * len(batches), 4.5), squeeze=False, sharey=True
    )
    markers = dict(zip(dict.fromkeys(row['network'] for row in rows), 'osD^vP*X', strict=False))
    for axis, batch in zip(axes[0], batches, strict=True):
        axis.plot([0, 1], [0, 1], color='0.8', zorder=0)
        for kind, colour in COLOURS.items():
            own = [row for row in rows if row['kind'] == kind and row['batch'] == batch]
            for row in own:
                saved = 1 - row['macs_ratio'], 1 - row['time_ratio']
                axis.scatter(*saved, color=colour, marker=markers[row['network']], s=30)
            if own:
                axis.scatter([], [], color=colour, label=kind)
        for network, marker in markers.items():
            axis.scatter([], [], color='0.3', marker=marker, label=network)
        axis.set_title(f'batch {batch}')
        axis.set_xlabel('MACs saved')
        axis.set_xlim(-0.02, 1)
        axis.axhline(0, color='0.8', linewidth=0.8, zorder=0)
    # Masked networks take longer than dense ones: all of them are to be seen.
    lowest = min(1 - row['time_ratio'] for row in rows)
    axes[0][0].set_ylim(min(-0.2, lowest - 0.05), 1)
    axes[0][0].set_ylabel('time saved')
    axes[0][0].legend(fontsize=8, loc='upper left')
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
        static, sparse = kinds['static'], kinds['sparse']
        limit = kinds.get('packed static')  # older files lack it
        lines.append(
            (
                network,
                size,
                str(batch),
                f'{100 * share:.0f} %',
                f'{sparse["macs_ratio"]:.2f}',
                *(f'{kinds[kind]["time_ratio"]:.2f}' for kind in ('packed', 'masked', 'static')),
                _percent(static['realised']),
                f'{sparse["time_ratio"]:.2f}',
                _percent(sparse['realised']),
                _percent(_of_limit(sparse, static)),
                f'{limit["time_ratio"]:.2f}' if limit else '',
                _percent(_of_limit(sparse, limit)) if limit else '',
            )
        )
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def _of_limit(sparse: dict, static: dict) -> float:
    """What the sparse network saves of what a static one does; nan where that is nothing."""
    saved = 1 - static['time_ratio']
    return (1 - sparse['time_ratio']) / saved if saved > 0.02 else float('nan')


def _percent(share: float) -> str:
    return '' if share != share else f'{100 * share:.0f} %'
