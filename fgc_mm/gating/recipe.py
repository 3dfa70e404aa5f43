# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The config of a training that gates a network, made from that of the dense one."""

from __future__ import annotations

import copy
import math
import os
from typing import Any, Optional

from mmengine.config import Config

from ..datasets import Pictures
from ..errors import UsageError
from ..nets.names import FAMILIES, OWN_FAMILIES
from ..runtime.config.files import type_name
from ..runtime.messages import explained
from .pipelines import pipelines_of, without_annotations

_LR, _BATCH = 0.05, 64
"""Learning rate, and the pictures of a step that it is for. Others get one by the square root."""
_GATES = dict(lr_mult=4.0, decay_mult=0.0)
_WEIGHT = 10.0
_REACH = 0.3
_PRUNING_PICTURES = 1024
_VALIDATIONS = 6
_WARMUP = 50
_LOGS = 20


def gated_model(cfg: Config, static: bool, batch_size: int) -> Any:
    """The config of a model with gates in its backbone.

    Args:
        cfg (Config): Of the dense model; it is not changed.
        static (bool): Whether the gates are the same for all pictures.
        batch_size (int): Pictures of a step on one process.

    Raises:
        UsageError: If the model has no backbone, or gates elsewhere.
    """
    model = copy.deepcopy(cfg.model)
    if type_name(model) == 'Gated' and model.get('model') is not None:
        if model.get('part', 'backbone') not in ('backbone', ['backbone'], ('backbone',)):
            raise UsageError(
                f'model.part={model.part!r}: fgc gate gates backbones; train other parts by a '
                'config of your own, see docs/sites.md'
            )
        owner, inner = model, model['model']
        backbone = inner.get('backbone')
    else:
        owner, inner, backbone = None, model, model.get('backbone')
    if not isinstance(backbone, dict):
        raise UsageError(f'config {cfg.filename}: model.backbone={backbone!r} must be a dict')
    # Weights come from the checkpoint. Layers that do not learn could not do without channels.
    for node in (model, inner, backbone, backbone.get('backbone')):
        if isinstance(node, dict):
            node.pop('pretrained', None)
            if node.get('init_cfg') is not None:
                node['init_cfg'] = None
            if node.get('frozen_stages', -1) >= 0:
                node['frozen_stages'] = -1
    if owner is None and type_name(backbone) not in ('Gated', *FAMILIES, *OWN_FAMILIES):
        model['backbone'] = dict(type='Gated', backbone=backbone)
    owner = owner or model['backbone']
    owner['gate'] = _gate(owner.get('gate'), static, batch_size)
    return model


def _gate(given: Optional[dict], static: bool, batch_size: int) -> dict:
    if static:
        return dict(type='StaticGate')
    if given is not None:
        return given
    # A few pictures are no batch to normalize over.
    norm = dict(type='BN1d') if batch_size >= 32 else dict(type='LN')
    return dict(type='BinConcreteGate', norm_cfg=norm, bias_init=3.0)


def training_config(
    cfg: Config,
    checkpoint: str,
    target: float,
    static: bool,
    folder: Optional[str],
    steps: int,
) -> tuple[Config, list[str]]:
    """The config of the training.

    Args:
        cfg (Config): Of the dense model; it is not changed.
        checkpoint (str): Its weights.
        target (float): Share of the MACs to execute.
        static (bool): Whether the same channels are closed for all pictures.
        folder (str, optional): Of pictures; None for those of the config's training.
        steps (int): Length of the training.

    Returns:
        tuple: The config, and the transforms that are left out because they need annotations.
    """
    train = copy.deepcopy(cfg)
    loader = _loader(cfg)
    scope = cfg.get('default_scope')
    pictures = (
        dict(folder=folder)
        if folder is not None
        else dict(source=copy.deepcopy(loader['dataset']), scope=scope)
    )
    with explained('the training pictures cannot be listed'):
        whole = Pictures(**copy.deepcopy(pictures), serialize_data=False)
    own = pipelines_of(loader['dataset'])
    if folder is not None and not any('LoadImage' in str(step['type']) for step in own):
        raise UsageError(
            f'--pictures {folder}: the pipeline of config {cfg.filename} loads no files; leave '
            '--pictures out'
        )
    pipeline, dropped = without_annotations(own, whole, scope)
    batch = int(loader.get('batch_size') or 1)
    common = dict(type='Pictures', **pictures)
    kept = ('batch_size', 'num_workers', 'persistent_workers', 'pin_memory', 'collate_fn')
    train.train_dataloader = {
        **{key: loader[key] for key in kept if key in loader},
        'sampler': dict(type='InfiniteSampler', shuffle=True),
        'dataset': dict(common, part='train', pipeline=pipeline),
    }
    seen = _test_loader(cfg) or loader
    plain, _ = without_annotations(pipelines_of(seen['dataset']), whole, scope)
    train.val_dataloader = {
        **{key: seen[key] for key in kept if key in seen},
        'sampler': dict(type='DefaultSampler', shuffle=False),
        'dataset': dict(common, part='held_back', pipeline=plain, test_mode=True),
    }
    every = max(1, steps // _VALIDATIONS)
    train.train_cfg = dict(by_epoch=False, max_iters=steps, val_interval=every)
    train.val_cfg, train.val_evaluator = dict(type='ValLoop'), []
    for key in ('test_dataloader', 'test_cfg', 'test_evaluator', 'tta_model', 'tta_pipeline'):
        train.pop(key, None)
    train.model = gated_model(cfg, static, batch)
    _without_mixing(train)
    train.optim_wrapper = dict(
        type='OptimWrapper',
        optimizer=dict(
            type='SGD',
            lr=_LR * math.sqrt(batch / _BATCH),
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-4,
        ),
        # Heads may share layers between levels.
        paramwise_cfg=dict(custom_keys=dict(gate=dict(_GATES)), bypass_duplicate=True),
        clip_grad=dict(max_norm=10.0),
    )
    warmup = min(_WARMUP, steps // 10)
    train.param_scheduler = [
        dict(type='CosineAnnealingLR', T_max=steps, begin=0, end=steps, by_epoch=False)
    ]
    if warmup:
        train.param_scheduler.append(
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=warmup)
        )
    train.auto_scale_lr = None
    train.custom_hooks = [
        *gating_hooks(target, static, -(-_PRUNING_PICTURES // batch)),
        dict(
            type='DistillationHook', teacher=os.path.abspath(checkpoint), weight=_WEIGHT, task=0.0
        ),
        dict(type='GatedMACsHook'),
    ]
    train.default_hooks = dict(
        timer=dict(type='IterTimerHook'),
        logger=dict(type='LoggerHook', interval=max(1, steps // _LOGS)),
        param_scheduler=dict(type='ParamSchedulerHook'),
        checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=every, max_keep_ckpts=1),
        sampler_seed=dict(type='DistSamplerSeedHook'),
    )
    train.log_processor = dict(by_epoch=False)
    train.find_unused_parameters = True
    train.load_from, train.resume = checkpoint, False
    train.custom_imports = with_import(cfg)
    return train, dropped


def gating_hooks(target: float, static: bool, batches: int) -> list[dict]:
    """What closes channels."""
    if static:
        return [
            dict(type='StaticPruningHook', criterion='features', target=target, batches=batches)
        ]
    return [dict(type='BudgetHook', target=target, reach=_REACH)]


def final_config(cfg: Config, target: float, static: bool, batch: int, load_from: str) -> Config:
    """The config that goes with the checkpoint: that of the dense network, with gates."""
    final = copy.deepcopy(cfg)
    final.model = gated_model(cfg, static, batch)
    final.load_from = load_from
    final.custom_imports = with_import(cfg)
    hooks = [hook for hook in cfg.get('custom_hooks') or [] if not _is_ours(hook)]
    more = [] if static else gating_hooks(target, False, 0)
    final.custom_hooks = [*hooks, *more, dict(type='GatedMACsHook')]
    for key in ('work_dir', 'launcher', 'resume'):
        final.pop(key, None)
    return final


def with_import(cfg: Config) -> dict:
    """``custom_imports`` with this package."""
    imports = cfg.get('custom_imports') or dict(imports=[])
    names = imports['imports']
    names = [names] if isinstance(names, str) else list(names)
    return dict(imports, imports=names if 'fgc_mm' in names else [*names, 'fgc_mm'])


def _is_ours(hook: Any) -> bool:
    return type_name(hook) in (
        'BudgetHook',
        'DistillationHook',
        'GatedMACsHook',
        'L0Hook',
        'StaticPruningHook',
    )


def _loader(cfg: Config) -> Any:
    loader = cfg.get('train_dataloader') or _test_loader(cfg)
    if not loader or not isinstance(loader.get('dataset'), dict):
        raise UsageError(
            f'config {cfg.filename} has no train_dataloader, whose pipeline prepares pictures'
        )
    return loader


def _test_loader(cfg: Config) -> Any:
    return cfg.get('val_dataloader') or cfg.get('test_dataloader')


def _without_mixing(cfg: Config) -> None:
    """Take out what mixes the pictures of a batch, which needs their annotations."""
    for owner in (cfg, cfg.model, cfg.model.get('model')):
        if not isinstance(owner, dict):
            continue
        preprocessor = owner.get('data_preprocessor')
        if isinstance(preprocessor, dict) and preprocessor.get('batch_augments'):
            preprocessor['batch_augments'] = None
        settings = owner.get('train_cfg') if owner is not cfg else None
        if isinstance(settings, dict) and settings.get('augments'):
            settings['augments'] = None
