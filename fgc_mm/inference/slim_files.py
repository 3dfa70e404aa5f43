# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From a config and a checkpoint to smaller ones."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import HOOKS
from mmengine.runner import CheckpointLoader, Runner
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..errors import CheckpointError, UsageError
from ..evaluation import GatedMACs, PredictionCounter
from ..gates import find_gates
from ..runtime import Attachments, unwrap
from ..training import GateLossHook
from .gating_config import model_config, with_gating
from .network_files import load_exactly
from .slim import GateUsage, Slimmed, slim

EQUAL = 1e-4
"""Relative difference up to which outputs count as the same."""


def slim_checkpoint(
    cfg: Config, runner: Runner, checkpoint: str, split: str = 'val', tolerance: float = 0.0
) -> tuple[Config, dict, dict[str, Any]]:
    """Slim a checkpoint on the images of a split.

    The images pass three times: once to see which channels they open, then
    through both models, whose backbone outputs are compared.

    Args:
        cfg (Config): The config; it is not changed.
        runner (Runner): Built from it; its model is loaded here.
        checkpoint (str): File of the weights.
        split (str): Whose dataloader and evaluator to take, 'val' or 'test'.
            Defaults to 'val'.
        tolerance (float): Remove channels open for at most this share of the
            images. Defaults to 0.

    Returns:
        tuple: Config of the smaller model, its checkpoint, and a report:
        ``images``, ``gates`` (see :class:`Slimmed`), ``parameters``,
        ``weights_bytes``, ``file_bytes`` and ``metrics`` (dicts of before and
        after; the pruning ratio of both is that of the network before),
        ``max_difference`` of the backbone outputs, relative,
        ``dropped_hooks``, those that need gates where none is left, and
        ``checkpoint_bytes`` and ``checkpoint_also_holds`` of the given file.

    Raises:
        UsageError: If there is nothing to slim or to slim with, the checkpoint
            does not fit, outputs are not finite, or at tolerance 0 not the same.
    """
    model = unwrap(runner.model)
    if not find_gates(model):
        raise UsageError(f'the model {type(model).__name__} has no gates, there is nothing to slim')
    loaded = load_fitting(model, checkpoint)
    loader = runner.build_dataloader(cfg[f'{split}_dataloader'])
    result = slim(model, _usage(model, loader), tolerance)
    slim_cfg = slim_config(cfg, result)
    smaller = runner.build_model(model_config(slim_cfg))
    smaller.load_state_dict(result.model.state_dict())
    smaller.to(next(model.parameters()).device)
    dropped = [] if find_gates(smaller) else _drop_gate_hooks(slim_cfg)
    pair = {'before': model, 'after': smaller}
    networks = list(result.networks)
    metrics, difference = _compare(runner, pair, networks, loader, cfg[f'{split}_evaluator'])
    if not math.isfinite(difference):
        raise UsageError(
            'whether the slimmed network is the same cannot be told: on the images of '
            f'{split}_dataloader backbone outputs, before or after, are nan or infinite. Look for '
            f'such values in the weights of {checkpoint} and in the images'
        )
    if not tolerance and difference > EQUAL:
        raise UsageError(
            'the slimmed network is not the same on the images it was made for: backbone outputs '
            f'differ by {difference:.1e}, relative, more than {EQUAL:g}. A gate that is undecided '
            'to the last digit can do that: take other images (--split), or accept a change '
            '(--tolerance 1e-6)'
        )
    meta = loaded.get('meta', {})
    files = {
        'before': dict(meta=meta, state_dict=_on_cpu(model)),
        'after': dict(meta={**meta, 'cfg': slim_cfg.pretty_text}, state_dict=_on_cpu(smaller)),
    }
    # Against the network before: of what is left, less can be saved.
    dense = metrics['before']['macs/backbone_dense_G']
    executed = metrics['after']['macs/backbone_executed_G']
    metrics['after']['macs/pruning_ratio'] = 100 * (1 - executed / dense)
    report = dict(
        images=len(loader.dataset),
        tolerance=tolerance,
        max_difference=difference,
        parameters={name: sum(p.numel() for p in m.parameters()) for name, m in pair.items()},
        weights_bytes={
            name: sum(t.numel() * t.element_size() for t in content['state_dict'].values())
            for name, content in files.items()
        },
        # A checkpoint of a training holds more: both as files of weights alone.
        file_bytes={name: _file_bytes(content) for name, content in files.items()},
        checkpoint_bytes=os.path.getsize(checkpoint) if os.path.isfile(checkpoint) else None,
        checkpoint_also_holds=[key for key in loaded if key not in ('meta', 'state_dict')]
        if 'state_dict' in loaded
        else [],
        metrics=metrics,
        gates=result.gates,
        dropped_hooks=dropped,
    )
    return slim_cfg, files['after'], report


def load_fitting(model: nn.Module, path: str) -> dict:
    """Load a checkpoint that has exactly the weights of a model.

    Args:
        model (nn.Module): The model.
        path (str): The file.

    Returns:
        dict: The whole checkpoint.

    Raises:
        UsageError: If anything is missing, left over or of another shape.
    """
    try:
        loaded = CheckpointLoader.load_checkpoint(path, map_location='cpu', logger='silent')
    except Exception as error:  # pickle's own errors share no base class
        raise CheckpointError(f'checkpoint {path} cannot be read: {error}') from error
    state = loaded.get('state_dict', loaded) if isinstance(loaded, dict) else {}
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    load_exactly(model, state, f'checkpoint {path} does not fit the config')
    return loaded


@torch.no_grad()
def _usage(model: nn.Module, loader: Iterable) -> dict[str, Tensor]:
    usage = GateUsage(model)
    usage.attach()
    model.eval()
    try:
        for batch in loader:
            model.val_step(batch)  # type: ignore[operator]
    finally:
        usage.detach()
    return usage.shares()


def slim_config(cfg: Config, slimmed: Slimmed) -> Config:
    """The config of a slimmed model.

    Args:
        cfg (Config): That of the model before; it is not changed.
        slimmed (Slimmed): What is left of it.

    Raises:
        UsageError: If a network with gates is none that the config gates.
    """
    slim_cfg = copy.deepcopy(cfg)
    with_gating(slim_cfg.model, slimmed.networks)
    slim_cfg.model.pop('pretrained', None)
    imports = slim_cfg.get('custom_imports') or dict(imports=[])
    if 'fgc_mm' not in imports['imports']:
        slim_cfg.custom_imports = dict(imports, imports=[*imports['imports'], 'fgc_mm'])
    for key in ('work_dir', 'launcher', 'resume'):
        slim_cfg.pop(key, None)
    return slim_cfg


def _drop_gate_hooks(cfg: Config) -> list[str]:
    """Take hooks that train gates out of a config; returns their types."""
    dropped, left = [], []
    for hook in cfg.get('custom_hooks') or []:
        found = HOOKS.get(hook['type']) if isinstance(hook['type'], str) else hook['type']
        if isinstance(found, type) and issubclass(found, GateLossHook):
            dropped.append(found.__name__)
        else:
            left.append(hook)
    if dropped:
        cfg.custom_hooks = left
    return dropped


@torch.no_grad()
def _compare(
    runner: Runner,
    models: dict[str, nn.Module],
    networks: Sequence[str],
    loader: Any,
    evaluator_cfg: Any,
) -> tuple[dict[str, dict], float]:
    """Metrics of both models, and the largest difference of what their gated networks give."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in models}
    attached, counters, evaluators = Attachments(), [], {}
    for name, model in models.items():
        model.eval()
        for network in networks:
            attached.after(model.get_submodule(network), partial(_gather, outputs[name]))
        counters.append(PredictionCounter(model))
        evaluators[name] = runner.build_evaluator(copy.deepcopy(evaluator_cfg))
        evaluators[name].metrics.append(GatedMACs())
        evaluators[name].dataset_meta = getattr(loader.dataset, 'metainfo', None)
    differences = [0.0]
    for counter in counters:
        counter.attach()
    try:
        for batch in loader:
            for name, model in models.items():
                outputs[name].clear()
                samples = model.val_step(copy.deepcopy(batch))  # type: ignore[operator]
                evaluators[name].process(data_samples=samples, data_batch=batch)
            for old, new in zip(*outputs.values(), strict=True):
                differences.append(float((old - new).abs().max()) / (float(old.abs().max()) or 1.0))
    finally:
        attached.remove()
        for counter in counters:
            counter.detach()
    size = len(loader.dataset)
    metrics = {name: evaluator.evaluate(size) for name, evaluator in evaluators.items()}
    return metrics, float(np.max(differences))  # nan, if there is one


def _gather(into: list[Tensor], module: nn.Module, args: tuple, outs: Any) -> None:
    into.extend(out for out in tree_flatten(outs)[0] if isinstance(out, Tensor))


def _on_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu() for key, value in model.state_dict().items()}


def _file_bytes(content: dict) -> int:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer().nbytes
