# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Runs a checkpoint over pictures and keeps what its gates did."""

from __future__ import annotations

import copy
import hashlib
import logging
import tempfile
import uuid
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import DATASETS, DefaultScope
from mmengine.runner import Runner
from torch.utils.data import Subset

from ..datasets import name_broken_pictures
from ..errors import CheckpointError, UsageError
from ..evaluation import PredictionCounter, counted_backbone, read_macs
from ..evaluation.checkpoint_fit import CheckpointFitHook
from ..gates import Gate, find_gates, select_blocks
from ..macs import MACsTracer
from ..runtime import launch, unwrap
from ..runtime.checkpoints.file import existing
from ..runtime.config.files import type_name
from ..tasks import annotation_fields, task_of_sample
from .gate_table import MACS, SPACES, GateTable
from .progress import progress

_FORMAT = 4  # of the cache; raised when what is gathered changes


def gather(
    cfg: Config,
    checkpoint: str,
    split: str = 'test',
    max_images: Optional[int] = None,
    cache_dir: Optional[Path] = None,
    read_cache: bool = True,
) -> GateTable:
    """What the gates of a checkpoint do over a split, from the cache if it is there.

    Args:
        cfg (Config): Config of a network with gates, of any task.
        checkpoint (str): Its weights.
        split (str): ``'val'`` or ``'test'``. Defaults to 'test'.
        max_images (int, optional): Take that many pictures, evenly spread over
            the split. Defaults to None, all.
        cache_dir (Path, optional): Folder of the cache. Defaults to None: none.
        read_cache (bool): Whether to take what is in it; otherwise it is made anew.
            Defaults to True.

    Raises:
        UsageError: If there are no gates, no pictures or no annotations.
        CheckpointError: If the weights are of another network, or of one without gates.
    """
    check_max_images(max_images)
    loader = cfg.get(f'{split}_dataloader')
    if loader is None:
        raise UsageError(f'the config has no {split}_dataloader to take pictures from')
    local_file(checkpoint)
    path = None
    if cache_dir is not None:
        path = cache_dir / f'gates_{_key(cfg, checkpoint, split, max_images)}.npz'
        if read_cache and path.is_file():
            try:
                return GateTable.load(path)
            except Exception as error:  # damaged, or with pickles in it, which are not read
                print_log(f'{path} is left: {error!r}', logger='current', level=logging.WARNING)
    cfg = copy.deepcopy(cfg)  # what is filled in below is no part of the key
    launch.prepare_data(cfg, (split,))
    launch.fill_dataloader_defaults(cfg)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        runner = _runner(copy.deepcopy(cfg), checkpoint, logs)
        table = _run(runner, cfg, checkpoint, split, max_images)
    table.check_finite(checkpoint)
    if path is not None:
        try:
            table.save(path)
        except OSError as error:  # a folder that is not ours: go on without
            print_log(f'no cache: {error}', logger='current', level=logging.WARNING)
    return table


def check_max_images(max_images: Optional[int]) -> None:
    """Refuse a number of pictures that nothing can be compared in."""
    if max_images is not None and max_images < 2:
        raise UsageError(f'--max-images {max_images} must be 2 or more')


def local_file(checkpoint: str) -> str:
    """A checkpoint that is a file here: tables and caches go beside it, by what it holds."""
    if '://' in checkpoint:
        raise UsageError(
            f'checkpoint {checkpoint} is an address; download it and name the file, beside which '
            'the figures and what they are drawn from are kept'
        )
    return existing(checkpoint)


def build_dataset(cfg: Config, split: str) -> Any:
    """The dataset of a split, with every annotation read."""
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
        dataset = DATASETS.build(cfg[f'{split}_dataloader']['dataset'])
        if hasattr(dataset, 'full_init'):
            dataset.full_init()
    name_broken_pictures(dataset)
    return dataset


def _key(cfg: Config, checkpoint: str, split: str, max_images: Optional[int]) -> str:
    digest = hashlib.sha256()
    with open(checkpoint, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    plain = cfg.to_dict()
    keys = ('model', f'{split}_dataloader', 'custom_hooks', 'data_preprocessor', 'default_scope')
    parts = [plain.get(key) for key in keys]
    digest.update(repr((_FORMAT, parts, split, max_images)).encode())
    return digest.hexdigest()[:16]


def set_aside(cfg: Config, checkpoint: str, work_dir: str) -> None:
    """Set a config to test a checkpoint: quiet, in a folder of its own, for nobody else to see.

    Of several in one process each has its own name, and so its own visualizer: one of the
    config's name would be shared with the next, and with it a folder that may be gone then.
    """
    cfg.work_dir, cfg.load_from, cfg.resume = work_dir, checkpoint, False
    cfg.log_level, cfg.experiment_name = 'ERROR', f'aside-{uuid.uuid4()}'
    if cfg.get('visualizer'):  # not the services a training reports to
        cfg.visualizer.vis_backends = [dict(type='LocalVisBackend')]
        cfg.visualizer.name = cfg.experiment_name


def _runner(cfg: Config, checkpoint: str, work_dir: str) -> Runner:
    set_aside(cfg, checkpoint, work_dir)
    cfg.custom_hooks = []
    runner = launch.build_runner(cfg)
    gates = find_gates(unwrap(runner.model))
    if not gates:
        raise UsageError(
            f'the model {type(unwrap(runner.model)).__name__} of this config has no gates to look '
            "at; take a config with a gated backbone, such as backbone=dict(type='GatedResNet')"
        )
    fit = CheckpointFitHook(checkpoint)
    runner.register_hook(fit)
    runner.load_or_resume()
    own = {f'{name}.{key}' for name, gate in gates.items() for key in gate.state_dict()}
    missing = sorted(own - fit.keys)
    if missing:  # they would decide at random
        raise CheckpointError(
            f'checkpoint {checkpoint} has no weights for gates of this network: {len(missing)} '
            f'tensors are missing, {missing[0]} the first; give a checkpoint trained with gates'
        )
    runner.model.eval()
    return runner


@torch.no_grad()
def _run(
    runner: Runner, cfg: Config, checkpoint: str, split: str, max_images: Optional[int]
) -> GateTable:
    model = unwrap(runner.model)
    # What a gate decides for levels and regions is not one figure of a picture.
    chosen = select_blocks(model, 'all')
    blocks = {name: block for block, own in chosen.items() for name, _ in own}
    gates = {name: gate for name, gate in find_gates(model).items() if name in blocks}
    dataset = build_dataset(cfg, split)
    count = len(dataset)
    if not count:
        raise UsageError(f'the {split} split of this config has no pictures')
    wanted = min(count, max_images or count)
    positions = np.linspace(0, count - 1, wanted).round().astype(np.int64)
    settings = {**cfg[f'{split}_dataloader'], 'dataset': Subset(dataset, positions.tolist())}
    settings['sampler'] = dict(type='DefaultSampler', shuffle=False)
    loader = runner.build_dataloader(settings)
    counter = PredictionCounter(model, counted_backbone(cfg))
    kept: dict[str, dict[str, list]] = {kind: {name: [] for name in gates} for kind in SPACES}
    pictures: list[tuple[np.ndarray, int, str]] = []
    macs: list[list[float]] = []
    counter.attach()
    for gate in gates.values():
        gate.wants_feature = True
    try:
        with progress(f'gates of {Path(checkpoint).name}', wanted) as advance:
            for batch in loader:
                outputs = model.test_step(batch)  # type: ignore[operator]
                macs += [[getattr(read_macs(sample), name) for name in MACS] for sample in outputs]
                for sample in batch['data_samples']:
                    task = task_of_sample(sample)
                    if not task.name:
                        *others, last = annotation_fields()
                        raise UsageError(
                            f'the pictures of {split}_dataloader come without classes (no '
                            f"{', '.join(others)} or {last}): add dict(type='LoadAnnotations') to "
                            'its pipeline'
                        )
                    path = str(sample.metainfo.get('img_path') or '')
                    pictures.append((*task.annotation(sample), path))
                for name, gate in gates.items():
                    for kind, own in kept.items():
                        own[name].append(_decided(name, gate, kind, len(outputs)))
                advance(len(outputs))
    finally:
        counter.detach()
    logits, mask, feature = (
        {name: np.concatenate(parts) for name, parts in kept[kind].items()} for kind in SPACES
    )
    amounts, objects, paths = zip(*pictures, strict=True)
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    width = max(len(names), *map(len, amounts))
    return GateTable(
        logits=logits,
        mask={name: own.astype(np.uint8) for name, own in mask.items()},
        feature=feature,
        classes=[*map(str, names), *map(str, range(len(names), width))],
        amount=np.stack([np.pad(row, (0, width - len(row))) for row in amounts]).astype(np.float32),
        objects=np.array(objects),
        positions=positions,
        paths=list(paths),
        macs=np.array(macs),
        costs=_layer_costs(counter.tracer, wanted),
        info=dict(
            checkpoint=Path(checkpoint).name,
            split=split,
            task=task.name,
            pictures=count,
            coupled=[
                name
                for hook in cfg.get('custom_hooks') or []
                if type_name(hook).endswith('FGCHook') and hook.get('eta', 1) != 0
                for own in select_blocks(model, hook.get('layers', 'last_stage')).values()
                for name, _ in own
            ],
            blocks=blocks,
        ),
    )


def _decided(name: str, gate: Gate, kind: str, images: int) -> np.ndarray:
    """What a gate did in a batch; of several views of a picture, in the last."""
    if gate.record is None:
        raise UsageError(f'gate {name!r} did not run in a pass of the network')
    values = getattr(gate.record, kind).detach().float().cpu()
    return values.reshape(images, -1, values.size(-1))[:, -1].numpy()


def _layer_costs(tracer: MACsTracer, images: int) -> list[dict[str, Any]]:
    """Dense and executed MACs per picture of every layer that ran, see :class:`GateTable`."""
    rows = []
    for name, (inside, own) in tracer.layers.items():
        if name in tracer.by_layer:
            dense, executed = (value / images for value in tracer.by_layer[name])
            kind = 'gated' if name in tracer.switches else 'plain'
            kind = 'gate' if own else kind if inside else 'outside'
            # Gates are no part of the dense network.
            rows.append(dict(layer=name, kind=kind, dense=0.0 if own else dense, executed=executed))
    return rows
