# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The metric: how much computation was saved."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from ..macs import ImageMACs

FIELD = 'gated_macs'
"""Name of the :class:`ImageMACs` in a data sample."""


@METRICS.register_module()
class GatedMACs(BaseMetric):
    """Executed computation over the evaluated images, as a ratio of sums.

    It reads the :class:`~fgc_mm.macs.ImageMACs` that
    :class:`GatedMACsHook` writes into each data sample. That hook also adds
    this metric to the evaluator, so it need not be listed.

    It reports, besides a table of the gates in the log:

    - ``macs/pruning_ratio``: percent of the backbone's MACs that was saved, the
      gates' own MACs set against it;
    - ``macs/backbone_executed_G``, ``macs/backbone_dense_G``: 10^9 MACs of the
      backbone per image, with gates and without;
    - ``macs/model_executed_G``, ``macs/model_dense_G``: of the whole model;
    - ``gates/openness``: share of all channel decisions that were open;
    - ``gates/closed``: share that was closed;
    - ``gates/dynamic``: share of channels neither always on nor never on.

    A model without gates has 0 % saved, openness 1 and no table.

    Args:
        collect_device (str): Device for collecting results, 'cpu' or 'gpu'.
            Defaults to 'cpu'.
        prefix (str, optional): Put before all names. Defaults to None.
        collect_dir (str, optional): Folder for collecting on 'cpu'.
            Defaults to None.

    Attributes:
        layer_table (list[dict]): One row per gate, see :func:`layer_rows`; of
            the last evaluation, on the main process.
    """

    default_prefix = ''

    layer_table: Sequence[dict[str, Any]] = ()

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Take the MACs out of each data sample."""
        for sample in data_samples:
            macs = sample.get(FIELD) if hasattr(sample, 'get') else None
            if not isinstance(macs, ImageMACs):
                raise UsageError(
                    f'GatedMACs: a data sample has no {FIELD!r}, nobody counted; add '
                    "custom_hooks=[dict(type='GatedMACsHook')] to the config"
                )
            self.results.append(macs)

    def compute_metrics(self, results: list[ImageMACs]) -> dict[str, float]:
        """The figures by name."""
        totals = {
            name: sum(getattr(image, name) for image in results)
            for name in ('backbone_executed', 'backbone_dense', 'model_executed', 'model_dense')
        }
        if not totals['backbone_dense']:
            raise UsageError(
                f'GatedMACs: no convolution or linear layer of the backbone ran in {len(results)} '
                "images, so there is no ratio; name the right part by GatedMACsHook's backbone=..."
            )
        saved = 1 - totals['backbone_executed'] / totals['backbone_dense']
        figures = {'macs/pruning_ratio': 100 * saved}
        figures |= {f'macs/{name}_G': sum_ / len(results) / 1e9 for name, sum_ in totals.items()}
        self.layer_table = layer_rows(results)
        channels = np.array([row['channels'] for row in self.layer_table])
        if len(channels):
            openness = np.array([row['openness_mean'] for row in self.layer_table])
            fixed = np.array([row['always_on'] + row['never_on'] for row in self.layer_table])
            mean = float((openness * channels).sum() / channels.sum())
            dynamic = float(1 - fixed.sum() / channels.sum())
            print_log('Gates\n' + _format_table(self.layer_table), logger='current')
        else:
            mean, dynamic = 1.0, 0.0
            print_log('The model has no gates: nothing is switched off.', logger='current')
        figures |= {'gates/openness': mean, 'gates/closed': 1 - mean, 'gates/dynamic': dynamic}
        return figures


def layer_rows(images: Sequence[ImageMACs]) -> list[dict[str, Any]]:
    """What each gate decided over all images.

    Args:
        images (Sequence[ImageMACs]): The images; several passes over one count
            as several decisions.

    Returns:
        list[dict]: For each gate ``gate`` (its name), ``channels``,
        ``openness_mean``, ``openness_min``, ``openness_max`` (share of open
        channels, over the images), ``always_on`` and ``never_on`` (numbers of
        channels).
    """
    open_counts: dict[str, np.ndarray] = {}
    shares: dict[str, list[float]] = {}
    decided: Counter[str] = Counter()
    for image in images:
        for name, mask in image.masks().items():
            open_counts[name] = open_counts.get(name, 0) + mask.sum(axis=0, dtype=np.int64)
            shares.setdefault(name, []).extend(mask.mean(axis=1).tolist())
            decided[name] += len(mask)
        for name, (count, opened) in image.regions.items():
            open_counts[name] = open_counts[name] + opened
            shares[name] += [float(opened.mean() / count)] if count else []
            decided[name] += count
    return [
        gate_row(name, shares[name], counts, decided[name])
        for name, counts in open_counts.items()
        if shares[name]
    ]


def gate_row(
    gate: str, shares: Sequence[float], open_counts: np.ndarray, decided: int
) -> dict[str, Any]:
    """A row of :func:`layer_rows`: from the share of open channels in each decision, and in how
    many of all decisions each channel was open."""
    return dict(
        gate=gate,
        channels=len(open_counts),
        openness_mean=float(np.mean(shares)),
        openness_min=float(np.min(shares)),
        openness_max=float(np.max(shares)),
        always_on=int((open_counts == decided).sum()),
        never_on=int((open_counts == 0).sum()),
    )


_COLUMNS = {
    'gate': 'gate',
    'channels': 'channels',
    'openness_mean': 'open, mean',
    'openness_min': 'min',
    'openness_max': 'max',
    'always_on': 'always on',
    'never_on': 'never on',
}


def _format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    table = Table(box=SIMPLE, pad_edge=False)
    for key, title in _COLUMNS.items():
        table.add_column(title, justify='left' if key == 'gate' else 'right', no_wrap=True)
    for row in rows:
        cells = (row[key] for key in _COLUMNS)
        table.add_row(*(f'{100 * c:.1f} %' if isinstance(c, float) else str(c) for c in cells))
    out = io.StringIO()
    Console(file=out, width=120, color_system=None, force_terminal=False).print(table)
    return '\n'.join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
