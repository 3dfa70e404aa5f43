# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Outcomes of finished runs, kept in the repository: one small file each."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import torch
from mmengine.config import Config
from results_rows import PROJECT, TASKS, Task
from runs import Run
from sweep_points import slug

from fgc_mm.analysis.alignment import PANELS
from fgc_mm.analysis.tradeoff import RATIO
from fgc_mm.cli.config import merge_options
from fgc_mm.errors import UsageError
from fgc_mm.evaluation.summary import dump
from fgc_mm.runtime.config.files import read_config
from fgc_mm.runtime.untrusted.loading import guarded_loading

ALIGNMENT, SPEED, BEGUN = 'alignment.json', 'speed.json', 'fingerprint.json'
"""Files of a run's folder: how gates follow features, times, what it was begun with."""
_TIMED = ('kind', 'seconds', 'time_ratio', 'macs_ratio')
_STAMP = re.compile(r'^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d', re.MULTILINE)


class Kept:
    """The outcomes in a folder.

    An outcome counts as long as its run's config, bases included, is what it was
    trained with.

    Args:
        folder (Path): Has a folder for each task.
        work_dir (Path): Folder of all runs.
        tasks (Mapping[str, Task]): Defaults to all.
    """

    def __init__(self, folder: Path, work_dir: Path, tasks: Mapping[str, Task] = TASKS) -> None:
        self.folder = folder
        self.work_dir = work_dir
        self.tasks = tasks
        self._known: dict[Path, Optional[dict]] = {}

    def path(self, task: str, run: Run) -> Path:
        """Where the outcome of a run is kept."""
        return self.folder / task / f'{slug(run.label)}_seed{run.seed}.json'

    def seeds(self, task: str) -> set[int]:
        """The seeds of all that is kept of a task."""
        names = (path.stem for path in (self.folder / task).glob('*_seed*.json'))
        return {int(n) for n in (name.rpartition('_seed')[2] for name in names) if n.isdigit()}

    def read(self, task: str, run: Run) -> Optional[dict[str, Any]]:
        """The outcome of a run; None if there is none, or it is one of another config.

        Raises:
            UsageError: If the file holds something else.
        """
        path = self.path(task, run)
        if path not in self._known:
            self._known[path] = self._read(task, run, path) if path.is_file() else None
        return self._known[path]

    def _read(self, task: str, run: Run, path: Path) -> Optional[dict]:
        try:
            outcome = json.loads(path.read_text(encoding='utf-8'))
            _check(outcome, dict(task=task, label=run.label, seed=run.seed), self.tasks[task])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f'{error.args[0]} is missing' if isinstance(error, KeyError) else error
            raise UsageError(
                f'{path} is no kept outcome of {task}: {run.label}, seed {run.seed}: {reason}; '
                'take it from the repository again, or remove it to train that run anew'
            ) from None
        if outcome['fingerprint'] != fingerprint(run):
            print(f'not counted: {path} is of another config than {_name(run.base)} is now')
            return None
        return outcome

    def begin(self, run: Run) -> bool:
        """Note what a run is trained with.

        Returns:
            bool: Whether it may go on: not if it was begun with another config.
        """
        path, now = run.folder / BEGUN, fingerprint(run)
        known = _content(path)
        if run.figures.is_file() or run.checkpoint() is not None:
            if known is None:
                print(
                    f'{run.folder} does not say what it was begun with: {_name(run.base)} assumed'
                )
            elif known.get('fingerprint') != now:
                print(
                    f'{run.folder} was begun with another config than {_name(run.base)} is now; '
                    'remove that folder to train it again'
                )
                return False
        dump(path, dict(fingerprint=now))
        return True

    def keep(self, task: str, run: Run) -> None:
        """Write the outcome of a run that is finished and looked at."""
        alignment = _content(run.folder / ALIGNMENT)
        if alignment is None:
            print(f'not kept: {run.folder} has no {ALIGNMENT}, and no checkpoint to make it from')
            return
        metrics = {k: v for k, v in run.metrics().items() if isinstance(v, (int, float))}
        outcome = dict(
            task=task,
            label=run.label,
            seed=run.seed,
            metrics=metrics,
            alignment=alignment,
            speed=self._speed(run),
            fingerprint=_content(run.folder / BEGUN)['fingerprint'],  # type: ignore[index]
            config=dict(base=_name(run.base), custom_hooks=run.hooks),
            start=start_weights(run, self.tasks[task]),
            train=self._command(run.train_command()),
            test=self._command(run.test_command()),
            train_seconds=training_seconds(run.folder),
            machine=machine(),
        )
        self._write(self.path(task, run), outcome)

    def keep_speed(self, task: str, run: Run) -> None:
        """Write the times of a run beside what is kept of it."""
        outcome = self.read(task, run)
        assert outcome is not None
        self._write(self.path(task, run), {**outcome, 'speed': self._speed(run)})

    def _write(self, path: Path, outcome: dict[str, Any]) -> None:
        dump(path, outcome)
        self._known.pop(path, None)

    @staticmethod
    def _speed(run: Run) -> Optional[dict[str, Any]]:
        """Times of a run with the machine they are measured on, which may be another one."""
        measured = _content(run.folder / SPEED)
        if measured is None:
            return None
        rows = [{k: row[k] for k in _TIMED if k in row} for row in measured['rows']]
        return dict(machine=machine(), rows=rows)

    def _command(self, command: Sequence[str]) -> str:
        """A command as it is given in the project's root, on any machine."""
        words = ['python']
        for word in command[1:]:
            for root, name in ((PROJECT, ''), (self.work_dir, 'WORK_DIR')):
                if Path(word).is_relative_to(root):
                    word = str(name / Path(word).relative_to(root))
                    break
            words += [word] if word != '--resume' else []
        return shlex.join(words)


def _check(outcome: dict, about: dict[str, Any], task: Task) -> None:
    """See that an outcome is that of a run and has all that is shown of it."""
    for key, value in about.items():
        if outcome[key] != value:
            raise ValueError(f'{key} is {outcome[key]!r}, not {value!r}')
    numbers = [outcome['metrics'][name] for name in (task.metric, RATIO)]
    numbers += [gate[name] for gate in outcome['alignment'].values() for name in PANELS]
    times = outcome['speed']['rows'] if outcome['speed'] else []
    numbers += [row['time_ratio'] for row in times]
    if times and not {'sparse', 'static'} <= {row['kind'] for row in times}:
        raise ValueError('speed has no rows sparse and static')
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f'{number!r} is no number')
    for key in ('fingerprint', 'start'):
        if not isinstance(outcome[key], (str, type(None))):
            raise ValueError(f'{key} is {outcome[key]!r}, no checksum')


def fingerprint(run: Run) -> str:
    """Changes with every setting of the complete config of a run but work dir and seed."""
    cfg = copy.deepcopy(_config(run.base))
    if run.hooks is not None:
        cfg.custom_hooks = copy.deepcopy(list(run.hooks))
    if run.options:
        merge_options(cfg, run.options)
    content = cfg.to_dict()
    content.pop('work_dir', None)
    content.get('randomness', {}).pop('seed', None)  # every outcome has its own
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _config(path: Path) -> Config:
    return read_config(str(path))


def start_weights(run: Run, task: Task) -> Optional[str]:
    """The checksum of what a run has started from, None if that is not there any more.

    Public weights are the same everywhere; a dense network trained here is not,
    and rows that start from different ones are no comparison. Of the latter the
    weights alone count: two trainings of the same steps write different files.
    """
    public = task.start.endswith('.th')
    path = PROJECT / ('data/weights/' + task.start if public else _config(run.base).load_from)
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    if public:
        digest.update(path.read_bytes())
        return digest.hexdigest()[:16]
    with guarded_loading():
        weights = torch.load(path, map_location='cpu')['state_dict']
    for name, values in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def training_seconds(folder: Path) -> Optional[int]:
    """Wall time of a training by its logs, all sittings together; None if they do not say."""
    sittings = []
    for log in folder.glob('*/*.log'):
        text = log.read_text(errors='replace')
        stamps = _STAMP.findall(text)
        if '(train)' in text and len(stamps) > 1:
            first, last = (
                datetime.strptime(s, '%Y/%m/%d %H:%M:%S') for s in stamps[:: len(stamps) - 1]
            )
            sittings.append(int((last - first).total_seconds()))
    return sum(sittings) if sittings else None


def machine() -> dict[str, Any]:
    """What figures and times may depend on beside the config."""
    info = Path('/proc/cpuinfo')
    names = re.findall(r'^model name\s*:\s*(.+)$', info.read_text() if info.is_file() else '', re.M)
    processor = names[0] if names else platform.processor() or platform.machine()
    return dict(torch=str(torch.__version__), processor=processor, threads=torch.get_num_threads())


def _content(path: Path) -> Optional[dict]:
    return json.loads(path.read_text()) if path.is_file() else None


def _name(path: Path) -> str:
    return str(path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path.name)
