# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The picture of benchmarks/speed.py: time saved against MACs saved."""

from __future__ import annotations

from pathlib import Path

COLOURS = dict(static='0.45', sparse='tab:blue', masked='tab:orange')


def draw(rows: list[dict], path: Path) -> None:
    """Draw the figures of a run.

    Args:
        rows (list[dict]): As ``benchmarks/speed.py`` writes them.
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
            axis.scatter([], [], color=colour, label=kind)
        for network, marker in markers.items():
            axis.scatter([], [], color='0.3', marker=marker, label=network)
        axis.set_title(f'batch {batch}')
        axis.set_xlabel('MACs saved')
        axis.set_xlim(-0.02, 1)
        axis.set_ylim(-0.2, 1)
    axes[0][0].set_ylabel('time saved')
    axes[0][0].legend(fontsize=8, loc='upper left')
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
