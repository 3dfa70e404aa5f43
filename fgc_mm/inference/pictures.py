# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures through a trained network: results drawn, computation counted."""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.runner import CheckpointLoader

from ..datasets import picture_fault
from ..errors import CheckpointError, DataError, UsageError
from ..evaluation import PredictionCounter
from ..evaluation.gated_macs import FIELD
from ..macs import ImageMACs
from ..runtime.checkpoint_fit import check_fit

PICTURES = ('.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')
"""Endings of the files taken from a folder, in either case."""

Predict = Callable[[str], Any]


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
        if entry.is_file() and entry.name.lower().endswith(PICTURES)
    )
    if not found:
        raise FileNotFoundError(
            f'folder {path} has no picture directly in it (files ending in {", ".join(PICTURES)})'
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
        cfg (Config): Config of an mmdet, mmseg or mmpretrain model.
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
    scope = cfg.get('default_scope')
    if scope not in _INFERENCERS:
        raise UsageError(
            f'default_scope={scope!r} has no inferencer here; it must be one of '
            f'{", ".join(map(repr, _INFERENCERS))}'
        )
    try:
        weights = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu', logger='silent')
    except Exception as error:
        raise CheckpointError(f'{checkpoint} cannot be read as a checkpoint: {error}') from error
    model, predict = _INFERENCERS[scope](cfg, checkpoint, out_dir, device or get_device())
    check_fit(model, weights, checkpoint)
    counter = PredictionCounter(model, _backbone(cfg))
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


def _backbone(cfg: Config) -> str:
    for hook in cfg.get('custom_hooks') or []:
        if str(hook.get('type')).endswith('GatedMACsHook'):
            return hook.get('backbone', 'backbone')
    return 'backbone'


def _detector(cfg: Config, checkpoint: str, out_dir: str, device: str) -> tuple[Any, Predict]:
    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(cfg, checkpoint, device=device, show_progress=False)

    def predict(picture: str) -> Any:
        result = inferencer(picture, out_dir=out_dir, return_datasamples=True)
        return result['predictions'][0]

    return inferencer.model, predict


def _segmentor(cfg: Config, checkpoint: str, out_dir: str, device: str) -> tuple[Any, Predict]:
    from mmseg.apis import MMSegInferencer

    inferencer = MMSegInferencer(cfg, checkpoint, device=device)
    inferencer.show_progress = False

    def predict(picture: str) -> Any:
        return inferencer(picture, out_dir=out_dir, return_datasamples=True)

    return inferencer.model, predict


def _classifier(cfg: Config, checkpoint: str, out_dir: str, device: str) -> tuple[Any, Predict]:
    from mmpretrain.apis import ImageClassificationInferencer

    importlib.import_module('mmpretrain.utils.progress').disable_progress_bar = True  # type: ignore
    inferencer = ImageClassificationInferencer(cfg, checkpoint, device=device)
    os.makedirs(out_dir, exist_ok=True)  # it makes only the innermost folder itself

    def predict(picture: str) -> Any:
        # Class and score have no room on a picture as small as those of CIFAR.
        result = inferencer(
            picture, show_dir=os.path.join(out_dir, 'vis'), resize=224, return_datasamples=True
        )
        return result[0]

    return inferencer.model, predict


_INFERENCERS: dict[str, Callable[[Config, str, str, str], tuple[Any, Predict]]] = {
    'mmdet': _detector,
    'mmseg': _segmentor,
    'mmpretrain': _classifier,
}

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
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'macs.csv', 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    content = dict(pictures=list(rows), all=all_pictures(rows))
    (folder / 'macs.json').write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
