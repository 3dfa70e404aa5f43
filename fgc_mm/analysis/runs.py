# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Variants of a config, trained and tested once each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config

FIGURES = 'figures.json'
_COST_HOOKS = ('L0Hook', 'BudgetHook')


def vary(
    cfg: Config,
    target: Optional[float] = None,
    rho: Optional[float] = None,
    coupling: Optional[bool] = None,
    seed: Optional[int] = None,
) -> Config:
    """A config with another cost.

    Args:
        cfg (Config): The config; it is left as it is.
        target (float, optional): Share to execute: a :class:`BudgetHook` takes
            the place of an :class:`L0Hook`. Defaults to None.
        rho (float, optional): The other way round; of a schedule only the value
            changes. Defaults to None.
        coupling (bool, optional): False leaves the ``FGCHook`` out, True insists
            on one. Defaults to None.
        seed (int, optional): Seed of the run. Defaults to None, the config's.

    Raises:
        ValueError: If ``coupling`` is asked for and there is no ``FGCHook``.
    """
    cfg = cfg.copy()
    hooks = [dict(hook) for hook in cfg.get('custom_hooks') or []]
    if target is not None or rho is not None:
        hooks = _with_cost(hooks, target, rho)
    if coupling is True and not any(_is(hook, 'FGCHook') for hook in hooks):
        raise ValueError(
            'the config has no FGCHook in custom_hooks, so there is no way to train it with '
            'coupling; name a config that has'
        )
    if coupling is False:
        hooks = [hook for hook in hooks if not _is(hook, 'FGCHook')]
    cfg.custom_hooks = hooks
    if seed is not None:
        cfg.randomness = dict(cfg.get('randomness') or {}, seed=seed)
    return cfg


def _with_cost(hooks: list[dict], target: Optional[float], rho: Optional[float]) -> list[dict]:
    kind = 'BudgetHook' if target is not None else 'L0Hook'
    old = [hook for hook in hooks if _is(hook, *_COST_HOOKS)]
    new: dict[str, Any] = next((dict(h) for h in old if _is(h, kind)), dict(type=kind))
    if target is not None:
        new.pop('save', None)
        new['target'] = target
    else:
        given = new.get('rho')
        new['rho'] = dict(given, value=rho) if isinstance(given, dict) else rho
    place = next((i for i, hook in enumerate(hooks) if hook in old), len(hooks))
    rest = [hook for hook in hooks if hook not in old]
    return [*rest[:place], new, *rest[place:]]


def _is(hook: dict, *names: str) -> bool:
    kind = hook.get('type')
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', '')
    return name.rpartition('.')[2] in names


class Run:
    """One training and its test, in a folder; what is done is not done again.

    Args:
        cfg (Config): The config of the run.
        folder (Path): Its work dir.
        tools (Path): Folder of ``train.py`` and ``test.py``.
    """

    def __init__(self, cfg: Config, folder: Path, tools: Path) -> None:
        self.cfg, self.folder, self.tools = cfg, folder, tools

    def figures(self, options: Sequence[str] = ()) -> dict[str, Any]:
        """Train and test unless that is done.

        Args:
            options (Sequence[str]): Further ``--cfg-options`` of both tools.

        Returns:
            dict: The figures of ``tools/test.py``.
        """
        store = self.folder / FIGURES
        if not store.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            config = self.folder / 'config.py'
            self.cfg.dump(config)
            self._call('train.py', config, '--resume', options=options)
            checkpoint = Path((self.folder / 'last_checkpoint').read_text().strip())
            if not checkpoint.is_file():  # the folder was moved
                checkpoint = self.folder / checkpoint.name
            self._call('test.py', config, checkpoint, '--out', store, options=options)
        return read_figures(store)

    def _call(self, tool: str, *args: Any, options: Sequence[str]) -> None:
        command = [sys.executable, self.tools / tool, *args, '--work-dir', self.folder]
        command += ['--cfg-options', *options] if options else []
        subprocess.run([str(part) for part in command], check=True)


def read_figures(path: Path) -> dict[str, Any]:
    """The metrics in a file ``tools/test.py --out`` wrote.

    Raises:
        ValueError: If it is something else.
    """
    try:
        metrics = json.loads(Path(path).read_text())['metrics']
        metrics['macs/pruning_ratio']
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{path} holds no figures of tools/test.py --out: {error!r}') from None
    return metrics
