# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What gating a network has come to: cost, time, agreement with the dense network, the metric."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.dist import all_reduce
from mmengine.runner import Runner
from torch import Tensor

from ..evaluation import PredictionCounter, read_macs
from ..evaluation.summary import add_derived
from ..inference import freeze
from ..runtime import Attachments
from ..tasks import main_metrics, task_of_model

_TIMED, _REPEATS = 10, 7


@torch.no_grad()
def compare(dense: nn.Module, gated: nn.Module, loader: Iterable) -> dict[str, Any]:
    """MACs of both networks on pictures, and how far they predict the same.

    Args:
        dense (nn.Module): The model before.
        gated (nn.Module): The model after.
        loader (Iterable): Batches of pictures that were held back.

    Returns:
        dict: ``pictures``; ``macs``, the backbone's and the model's, in G, of both; ``share``
        executed; ``agreement`` from 0 to 1, None where the task has none, and ``agreement_of``.
    """
    task = task_of_model(gated)
    counter = PredictionCounter(gated)
    same = total = 0.0
    macs: list[Any] = []
    for model in (dense, gated):
        model.eval()
    counter.attach()
    try:
        for batch in loader:
            theirs = dense.val_step(copy.deepcopy(batch))  # type: ignore[operator]
            ours = gated.val_step(copy.deepcopy(batch))  # type: ignore[operator]
            macs += [read_macs(sample) for sample in ours]
            for one, other in zip(ours, theirs, strict=True):
                agreed, of = task.agreement(one, other)
                same, total = same + agreed, total + of
    finally:
        counter.detach()
    sums = {
        f'{part}_{kind}': sum(getattr(image, f'{part}_{kind}') for image in macs)
        for part in ('backbone', 'model')
        for kind in ('dense', 'executed')
    }
    # Several processes share the pictures.
    found = torch.tensor([same, total, len(macs), *sums.values()], dtype=torch.float64)
    found = found.to(next(gated.parameters()).device)
    all_reduce(found)
    same, total, pictures, *values = found.tolist()
    sums = dict(zip(sums, values, strict=True))
    return dict(
        pictures=int(pictures),
        macs={name: value / pictures / 1e9 for name, value in sums.items()},
        share=sums['backbone_executed'] / sums['backbone_dense'],
        agreement=same / total if total else None,
        agreement_of=task.agreement_of,
    )


@torch.no_grad()
def milliseconds(dense: nn.Module, gated: nn.Module, loader: Iterable) -> dict[str, float]:
    """Time of the backbone for one picture: of the dense network as it is and with its norms
    folded, and of the gated one by :func:`~fgc_mm.inference.freeze`.

    The three take turns; the median over pictures of the least time of each.
    """
    inputs: list[Tensor] = []
    attached = Attachments()
    attached.before(dense.get_submodule('backbone'), lambda _, args: inputs.append(args[0][:1]))
    try:
        for batch in islice(loader, _TIMED):
            dense.val_step(copy.deepcopy(batch))  # type: ignore[operator]
    finally:
        attached.remove()
    networks = dict(
        dense=dense.get_submodule('backbone'),
        dense_folded=freeze(dense.get_submodule('backbone')),
        gated=freeze(gated.get_submodule('backbone')),
    )
    for picture in inputs[:3] * 2:  # while a frozen network finds out what is fastest
        for network in networks.values():
            network(picture)
    found: dict[str, list[float]] = {name: [] for name in networks}
    for picture in inputs:
        times: dict[str, list[float]] = {name: [] for name in networks}
        for _ in range(_REPEATS):
            for name, network in networks.items():
                start = time.perf_counter()
                network(picture)
                if picture.is_cuda:
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - start)
        for name, each in times.items():
            found[name].append(1000 * min(each))
    return {name: statistics.median(each) for name, each in found.items()}


@torch.no_grad()
def task_metrics(
    runner: Runner, models: Mapping[str, Any], loader_cfg: Any, evaluator_cfg: Any
) -> dict[str, dict[str, float]]:
    """The task's metrics of several models, on labeled pictures."""
    loader = runner.build_dataloader(copy.deepcopy(loader_cfg))
    evaluators = {}
    for name, model in models.items():
        model.eval()
        evaluators[name] = runner.build_evaluator(copy.deepcopy(evaluator_cfg))
        evaluators[name].dataset_meta = getattr(loader.dataset, 'metainfo', None)
    for batch in loader:
        for name, model in models.items():
            samples = model.val_step(copy.deepcopy(batch))
            evaluators[name].process(data_samples=samples, data_batch=batch)
    size = len(loader.dataset)
    return {
        name: {
            key: float(value)
            for key, value in add_derived(evaluator.evaluate(size)).items()
            if isinstance(value, (int, float))
        }
        for name, evaluator in evaluators.items()
    }


def main_metric(metrics: Mapping[str, Mapping[str, float]]) -> Optional[str]:
    """The metric a reader looks for first."""
    known = next(iter(metrics.values()), {})
    return next((name for name in main_metrics() if name in known), next(iter(known), None))


def format_report(report: Mapping[str, Any]) -> str:
    """The report as lines of text."""
    macs, times = report['macs'], report['milliseconds']
    lines = [
        ('MACs of the backbone, G', f'{macs["backbone_dense"]:.4g}',
         f'{macs["backbone_executed"]:.4g} ({100 * report["share"]:.1f} %)'),
        ('MACs of the model, G', f'{macs["model_dense"]:.4g}', f'{macs["model_executed"]:.4g}'),
        ('ms of the backbone, a picture', f'{times["dense"]:.2f} ({times["dense_folded"]:.2f} with '
         'norms folded)', f'{times["gated"]:.2f} (fgc_mm.freeze)'),
    ]  # fmt: skip
    metric = main_metric(report['metrics'])
    if metric is not None:
        one, two = (report['metrics'][name][metric] for name in ('dense', 'gated'))
        lines.append((metric, f'{one:.4g}', f'{two:.4g}'))
    width = max(len(line[0]) for line in lines)
    middle = max(len(line[1]) for line in lines)
    text = [f'{"":<{width}}  {"dense":<{middle}}  gated']
    text += [f'{name:<{width}}  {before:<{middle}}  {after}' for name, before, after in lines]
    if report['agreement'] is not None:
        text.append(
            f'\nAgreement with the dense network: {100 * report["agreement"]:.1f} % '
            f'({report["agreement_of"]}), on {report["pictures"]} pictures that were held back'
        )
    elif report['agreement_of']:
        text.append(f'\nNeither finds anything on the {report["pictures"]} pictures held back')
    if metric is None:
        text.append(f'No metric of the task: {report["no_metrics"]}')
    return '\n'.join(text)
