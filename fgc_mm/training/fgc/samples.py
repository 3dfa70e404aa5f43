# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which instances a batch of data samples shows."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...datasets import INSTANCE_KEY
from ...errors import UsageError
from ...tasks import class_fields


def read_samples(data_samples: Any, with_labels: bool) -> tuple[Tensor, Optional[Tensor]]:
    """The index of every picture of a batch and, if they are needed, the labels."""
    if not isinstance(data_samples, (list, tuple)):
        raise UsageError(
            'data_samples must be a list with one data sample per picture, not a '
            f'{type(data_samples).__name__}'
        )
    indices = []
    for i, sample in enumerate(data_samples):
        index = getattr(sample, INSTANCE_KEY, None)
        if index is None:
            raise UsageError(
                f'data sample {i} of this batch has no {INSTANCE_KEY!r} in its metainfo; '
                'items of mmengine datasets get one by themselves, others must bring it along: '
                f'data_sample.set_metainfo({{{INSTANCE_KEY!r}: ...}})'
            )
        indices.append(int(index))
    labels = torch.tensor([_label(s) for s in data_samples]) if with_labels else None
    return torch.tensor(indices, dtype=torch.int64), labels


def _label(sample: Any) -> int:
    fields = class_fields()
    label = next((getattr(sample, field) for field in fields if hasattr(sample, field)), None)
    if label is None or torch.as_tensor(label).numel() != 1:
        none = f'no {" or ".join(fields)}'
        what = none if label is None else f'{torch.as_tensor(label).numel()} labels'
        raise UsageError(
            "source='label' needs pictures of one class each, but a "
            f"{type(sample).__name__} has {what}; use source='feature'"
        )
    return int(torch.as_tensor(label))
