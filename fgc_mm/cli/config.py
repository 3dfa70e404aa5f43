# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The config that a command line names, with its ``--cfg-options``."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from ..errors import UsageError, in_context
from ..nets.swaps import check_swaps, types_of
from ..runtime.config.files import config_path, read_config
from ..runtime.messages import did_you_mean, shortened

# What the tools and the packages read beside the arguments of a Runner.
_MORE = (
    'activation_checkpointing',
    'auto_scale_lr',
    'compile',
    'custom_imports',
    'demo_data',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'model_wrapper_cfg',
    'runner_type',
    'tta_model',
    'tta_pipeline',
)


def load_config(args: argparse.Namespace) -> Config:
    """Read the config of a command and merge its options.

    Args:
        args (Namespace): With ``config`` and ``cfg_options``, and those of
            :func:`~fgc_mm.cli.arguments.add_launcher` where the command has them.
    """
    os.environ.setdefault('LOCAL_RANK', str(getattr(args, 'local_rank', 0)))
    args.config = config_path(args.config)
    cfg = read_config(args.config)
    types = types_of(cfg.get('model'))
    merge_options(cfg, args.cfg_options)
    check_swaps(cfg, types)
    if 'model' not in cfg:
        raise UsageError(f'config {args.config} has no `model`: it is a fragment for `_base_`')
    if not isinstance(cfg.model, dict):
        raise UsageError(f'config {args.config}: model={cfg.model!r} must be a dict')
    cfg.launcher = getattr(args, 'launcher', 'none')
    if getattr(args, 'work_dir', None) is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config).stem)
    return cfg


def merge_options(cfg: Config, pairs: Optional[Sequence[str]]) -> None:
    """Write options, as ``KEY=VALUE`` in the notation of ``DictAction``, into a config."""
    reader, found = argparse.ArgumentParser(), argparse.Namespace(options=None)
    for pair in pairs or ():
        try:
            DictAction(['--options'], 'options')(reader, found, [pair], '--options')
        except (AssertionError, ValueError) as error:
            raise UsageError(f'--cfg-options {pair}: {error}') from error
    options = found.options or {}
    for key, value in options.items():
        with in_context(f'--cfg-options {key}={value}'):
            _check_path(cfg, key, value)
    try:
        cfg.merge_from_dict(dict(options))  # at once: `_delete_` belongs to its neighbors
    except Exception as error:
        text = str(error.args[0] if error.args else error)
        shown = ' '.join(f'{key}={value}' for key, value in options.items())
        raise UsageError(
            f'--cfg-options {shown} does not fit the config: {shortened(text, 200)}'
        ) from error


def _check_path(cfg: Config, key: str, value: Any) -> None:
    """See that a dotted key leads somewhere."""
    first, *_ = parts = key.split('.')
    known = sorted({*cfg, *inspect.signature(Runner.__init__).parameters, *_MORE})
    if first not in known:
        raise UsageError(
            f'the config has no {first!r}, so it would change nothing{did_you_mean(first, known)}'
        )
    node: Any = cfg
    for number, part in enumerate(parts):
        here = '.'.join(parts[:number])
        if isinstance(node, (list, tuple)):
            if not part.isdigit() or int(part) >= len(node):
                raise UsageError(
                    f'{here} is a list of {len(node)} entries; name one by its number, {here}.0 to '
                    f'{here}.{len(node) - 1}'
                )
            node = node[int(part)]
            if part is parts[-1] and isinstance(node, Mapping) and not isinstance(value, dict):
                names = ', '.join(f'{key}.{name}' for name in node)
                raise UsageError(f'{key} is a dict; name one of its settings: {names}')
        elif isinstance(node, (Config, Mapping)):
            if part not in node:
                return  # a new setting
            node = node[part]
        elif node is not None:
            raise UsageError(f'{here}={node!r} has nothing below it to set')
