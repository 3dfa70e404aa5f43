# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures through a trained network: results drawn, computation counted."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.runner import CheckpointLoader

from ..datasets import PICTURE_ENDINGS, picture_fault
from ..errors import CheckpointError, DataError
from ..files import write_files
from ..macs import ImageMACs
from ..tasks import task_of
from . import PredictionCounter, counted_backbone
from .checkpoint_fit import check_fit
from .gated_macs import FIELD


def find_pictures(path: str) -> list[str]:
    """The pictures a path stands for.

    Args:
        path (str): A picture, or a folder with pictures directly in it.

    Raises:
        FileNotFoundError: If there is nothing, or no picture in the folder.
    """
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise FileNotFoundError(f'{path} is neither a picture nor a folder')
    found = sorted(
        entry.path
        for entry in os.scandir(path)
        if entry.is_file() and entry.name.lower().endswith(PICTURE_ENDINGS)
    )
    if not found:
        raise FileNotFoundError(
            f'folder {path} has no picture directly in it (files ending in '
            f'{", ".join(PICTURE_ENDINGS)})'
        )
    return found


def infer(
    cfg: Config,
    checkpoint: str,
    pictures: Sequence[str],
    out_dir: str,
    device: Optional[str] = None,
) -> Iterator[tuple[str, ImageMACs]]:
    """Predict pictures one by one with the task's own inferencer.

    Drawn results go to ``<out_dir>/vis``.

    Args:
        cfg (Config): Config of a model whose task is known, see :mod:`fgc_mm.tasks`.
        checkpoint (str): Its weights.
        pictures (Sequence[str]): Files.
        out_dir (str): Folder for the results.
        device (str, optional): Where to run. Defaults to None, the best there is.

    Yields:
        tuple: Picture, and the computation it took.

    Raises:
        CheckpointError: If the checkpoint is of another network.
        DataError: If a picture cannot be read; it names the file.
        UsageError: If the task is not known.
    """
    try:
        weights = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu', logger='silent')
    except Exception as error:
        raise CheckpointError(f'{checkpoint} cannot be read as a checkpoint: {error}') from error
    model, predict = task_of(cfg).inferencer(cfg, checkpoint, out_dir, device or get_device())
    check_fit(model, weights, checkpoint)
    counter = PredictionCounter(model, counted_backbone(cfg))
    counter.attach()
    try:
        for picture in pictures:
            try:
                sample = predict(picture)
            except Exception as error:
                fault = picture_fault(picture)
                if fault is None:
                    raise
                raise DataError(fault) from error
            yield picture, sample.get(FIELD)
    finally:
        counter.detach()


COLUMNS = (
    'picture',
    'pruning_ratio',
    'backbone_executed_G',
    'backbone_dense_G',
    'model_executed_G',
    'model_dense_G',
)


def macs_rows(results: Sequence[tuple[str, ImageMACs]]) -> list[dict[str, Any]]:
    """A row for each picture, the ratio in percent, the rest in 10^9 MACs."""
    return [
        dict(
            zip(
                COLUMNS,
                (
                    picture,
                    100 * macs.pruning_ratio,
                    macs.backbone_executed / 1e9,
                    macs.backbone_dense / 1e9,
                    macs.model_executed / 1e9,
                    macs.model_dense / 1e9,
                ),
                strict=True,
            )
        )
        for picture, macs in results
    ]


def all_pictures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row over all pictures: means, and the ratio of the sums."""
    means = {name: sum(row[name] for row in rows) / len(rows) for name in COLUMNS[2:]}
    ratio = 100 * (1 - means['backbone_executed_G'] / means['backbone_dense_G'])
    return dict(picture='all', pruning_ratio=ratio, **means)


def write_rows(rows: Sequence[dict[str, Any]], out_dir: str) -> None:
    """Write ``macs.csv`` and ``macs.json``."""
    folder, table = Path(out_dir), io.StringIO()
    writer = csv.DictWriter(table, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    content = json.dumps(dict(pictures=list(rows), all=all_pictures(rows)), indent=2) + '\n'
    write_files({folder / 'macs.csv': table.getvalue(), folder / 'macs.json': content})
