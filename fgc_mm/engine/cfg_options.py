# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``--cfg-options``: settings of a config on the command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from .mistakes import UsageError, did_you_mean

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


class CfgOptions(DictAction):
    """mmengine's ``DictAction``, which says what it cannot read."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: Any = None,
    ) -> None:
        """Split key=value pairs; what is none ends the tool with a message."""
        for pair in values or ():
            key, equals, _ = pair.partition('=')
            if not equals or not key or not all(key.split('.')):
                parser.error(
                    f'{option_string} {pair}: write KEY=VALUE, as in model.backbone.depth=18'
                )
            try:
                super().__call__(parser, namespace, [pair], option_string)
            except (AssertionError, ValueError) as error:
                parser.error(f'{option_string} {pair}: {error}')


def merge_options(cfg: Config, options: Optional[Mapping[str, Any]]) -> None:
    """Write options into a config.

    Args:
        cfg (Config): The config.
        options (Mapping, optional): Dotted key -> value. None changes nothing.

    Raises:
        UsageError: If a key can have no effect, or an entry of a list or a
            setting below a number is named that is not there.
    """
    if not options:
        return
    check_keys(options, {*cfg, *inspect.signature(Runner.__init__).parameters, *_MORE})
    for key, value in options.items():
        _check_path(cfg, key, value)
    try:
        cfg.merge_from_dict(dict(options))  # at once: `_delete_` belongs to its neighbours
    except Exception as error:
        text = str(error.args[0] if error.args else error)
        shown = ' '.join(f'{key}={value}' for key, value in options.items())
        raise UsageError(
            f'--cfg-options {shown} does not fit the config: {_short(text)}'
        ) from error


def check_keys(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """See that the first part of every dotted key is known.

    Args:
        options (Mapping): Dotted key -> value.
        known (Iterable[str]): Keys of the config, and those a Runner reads.

    Raises:
        UsageError: For a key that nobody would ever read.
    """
    known = sorted(known)
    for key, value in options.items():
        first = key.partition('.')[0]
        if first not in known:
            raise UsageError(
                f'--cfg-options {key}={value}: the config has no {first!r}, so it would change '
                f'nothing{did_you_mean(first, known)}'
            )


def _check_path(cfg: Config, key: str, value: Any) -> None:
    """See that a dotted key leads somewhere."""
    node: Any = cfg
    parts = key.split('.')
    for number, part in enumerate(parts):
        here = '.'.join(parts[:number])
        if isinstance(node, (list, tuple)):
            if not part.isdigit() or int(part) >= len(node):
                raise UsageError(
                    f'--cfg-options {key}={value}: {here} is a list of {len(node)} entries; name '
                    f'one by its number, {here}.0 to {here}.{len(node) - 1}'
                )
            node = node[int(part)]
            if part is parts[-1] and isinstance(node, Mapping) and not isinstance(value, dict):
                raise UsageError(
                    f'--cfg-options {key}={value}: {key} is a dict; name one of its settings: '
                    f'{", ".join(f"{key}.{name}" for name in node)}'
                )
        elif isinstance(node, (Config, Mapping)):
            if part not in node:
                return  # a new setting
            node = node[part]
        elif node is not None:
            raise UsageError(
                f'--cfg-options {key}={value}: {here}={node!r} has nothing below it to set'
            )


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + ' ...'
