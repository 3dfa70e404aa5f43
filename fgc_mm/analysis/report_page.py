# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One page about one or more runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from ..errors import FgcError
from ..evaluation import gate_row
from ..files import write_files
from ..tasks import TASKS
from .gather import check_max_images, gather
from .optional_packages import need
from .report_data import payload
from .report_runs import ReportRun, read_run
from .tradeoff import RATIO, metric_unit

TEMPLATES = Path(__file__).parent / 'templates'


def write_report(
    work_dirs: Mapping[str, Path],
    out: Path,
    split: str = 'test',
    max_images: Optional[int] = 300,
    max_layers: int = 8,
    network: bool = True,
) -> list[ReportRun]:
    """Write the page.

    Args:
        work_dirs (Mapping[str, Path]): Name of the run -> its work dir.
        out (Path): The file.
        split (str): Whose pictures are looked at. Defaults to 'test'.
        max_images (int, optional): How many of them. Defaults to 300.
        max_layers (int): How many layers get an embedding. Defaults to 8.
        network (bool): Whether networks may run; otherwise the page has what
            the logs tell. Defaults to True.
    """
    check_max_images(max_images)
    jinja2 = need('jinja2', 'a report')
    runs = [read_run(folder, name) for name, folder in work_dirs.items()]
    for run in runs:
        _look_at_gates(run, split, max_images, network)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(number=readable, breakable=_breakable)
    environment.policies['json.dumps_kwargs'] = dict(separators=(',', ':'), allow_nan=False)
    data = payload(runs, max_layers)
    text = environment.get_template('report.html.j2').render(
        runs=runs,
        data=data,
        css=(TEMPLATES / 'report.css').read_text(encoding='utf-8'),
        js=(TEMPLATES / 'report.js').read_text(encoding='utf-8'),
        results=result_rows(runs),
        columns=result_columns(runs),
        costs=cost_rows(runs),
        gates=gate_rows(runs),
        differences=differences(runs),
        layers=data['layers'],
    )
    write_files({out: text})
    return runs


def _look_at_gates(run: ReportRun, split: str, max_images: Optional[int], network: bool) -> None:
    if not network:
        run.note = 'the network was not run'
    elif run.checkpoint is None:
        run.note = f'no checkpoint in {run.folder}'
    else:
        cache = run.folder / 'analysis' / 'cache'
        try:
            run.table = gather(run.cfg, str(run.checkpoint), split, max_images, cache)
        except FgcError as error:  # a dense network, data elsewhere now
            run.note = str(error)


def result_columns(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """Columns of the results: each run, then what the model index has for its config."""
    # Our name of a figure -> that of the model index, and what to multiply that one with.
    index = {RATIO: ('Pruning Ratio', 1.0)}
    for task in TASKS.values():
        index.update(task.index_names)
    columns = []
    for run in runs:
        title, detail = run.name, run.measured or 'no figures'
        columns.append(dict(title=title, detail=detail, metrics=run.metrics))
        for found in run.published:
            title, _, config = found['source'].partition(': ')
            known = found['metrics']
            metrics = {ours: known[name] * f for ours, (name, f) in index.items() if name in known}
            columns.append(dict(title=title, detail=f'model index, {config}', metrics=metrics))
    return columns


def result_rows(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """A row for each figure that a run has, a value or None for each column."""
    columns = [column['metrics'] for column in result_columns(runs)]
    return [
        dict(name=name, unit=metric_unit(name), values=[own.get(name) for own in columns])
        for name in dict.fromkeys(name for run in runs for name in run.metrics)
    ]


def cost_rows(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """A row for each layer of the backbone: dense MACs, and executed ones by run, in 10^6."""
    # All layers of a gate, and all outside of the backbone, are one row each.
    names = {'gate': 'gates themselves', 'outside': 'outside of the backbone'}
    rows: dict[str, dict[str, Any]] = {}
    for place, run in enumerate(runs):
        for cost in run.table.costs if run.table is not None else ():
            layer = names.get(cost['kind'], cost['layer'])
            row = rows.setdefault(layer, dict(layer=layer, cells=[None] * len(runs)))
            cell = row['cells'][place] or dict(dense=0.0, executed=0.0)
            row['cells'][place] = {name: cell[name] + cost[name] / 1e6 for name in cell}
            row['kind'] = cost['kind']
    return sorted(rows.values(), key=lambda r: (r['kind'] == 'outside', r['kind'] == 'gate'))


def gate_rows(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """A row for each gate and run, as ``tools/test.py`` prints them."""
    rows = []
    for run in runs:
        own = run.layers
        if not own and run.table is not None:
            own = [
                gate_row(name, mask.mean(axis=1), mask.sum(axis=0), len(mask))
                for name, mask in run.table.mask.items()
            ]
        rows += [dict(run=run.name, **row) for row in own]
    return rows


def differences(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """The settings in which the runs' configs differ; none for one run."""
    flat = [flatten(run.cfg.to_dict()) for run in runs]
    keys = list(dict.fromkeys(key for own in flat for key in own))
    rows = []
    for key in keys:
        values = [own.get(key) for own in flat]
        if any(value != values[0] for value in values) and key not in ('work_dir', 'launcher'):
            rows.append(dict(key=key, values=['' if v is None else v for v in values]))
    return rows


def flatten(node: Any, prefix: str = '') -> dict[str, str]:
    """Dotted keys -> values of a config.

    Hooks and steps of a pipeline go by their type, so that one more of them moves
    no other; which there are, and in which order, is a value of its own.
    """
    flat: dict[str, str] = {}
    if isinstance(node, dict) and node:
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, (list, tuple)) and any(isinstance(item, (dict, list)) for item in node):
        names = [_type(item) for item in node]
        if all(names):
            flat[prefix] = ', '.join(names)
            seen = [names[:place].count(name) for place, name in enumerate(names)]
            keys = [f'{n} {s + 1}' if s else n for n, s in zip(names, seen, strict=True)]
        else:
            keys = [str(number) for number in range(len(node))]
        pairs = list(zip(keys, node, strict=True))
    else:
        return {prefix: repr(node)}
    for key, value in pairs:
        flat |= flatten(value, f'{prefix}.{key}' if prefix else key)
    return flat


def _type(item: Any) -> str:
    """Name of what a dict of a config builds, '' of anything else."""
    kind = item.get('type', '') if isinstance(item, dict) else ''
    return str(getattr(kind, '__name__', kind)).rpartition('.')[2]


def readable(value: Any) -> str:
    """A number as people read it; nothing for None."""
    if value is None:
        return ''
    if isinstance(value, float):
        return 'NaN' if math.isnan(value) else f'{value:.4g}'
    return str(value)


def _breakable(name: Any) -> Any:
    """A name as HTML that may go on in the next line after a dot, a slash or an underscore."""
    markup = need('markupsafe', 'a report').Markup
    return markup(re.sub(r'([./_])(?=\w{2})', r'\1<wbr>', str(markup.escape(name))))
