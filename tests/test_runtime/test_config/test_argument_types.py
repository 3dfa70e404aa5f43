# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which arguments a class does not have, or has of another type."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union

import pytest
import torch
from mmcv.transforms import Resize
from mmdet.models import Shared2FCBBoxHead
from mmengine.registry import MODELS

from fgc_mm.nets import ResNetCifar
from fgc_mm.runtime.config.argument_types import argument_faults, describe, fits
from fgc_mm.training import BudgetHook, FGCHook

GATED = {name: MODELS.get(f'mmdet.{name}') for name in ('GatedResNet', 'GatedResNetV1d')}


class Mine(BudgetHook):
    """A user's, with an argument of its own."""

    def __init__(self, mine=0, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ('cls', 'given', 'expected'),
    [
        (GATED['GatedResNet'], dict(depth=18, widths=dict(layer1=8), init_cfg=None), []),
        (
            GATED['GatedResNet'],
            dict(frozen_stage=1),
            ["x.frozen_stage=1: GatedResNet has no argument 'frozen_stage'; did you mean"],
        ),
        (ResNetCifar, dict(depth='20'), ["x.depth='20' must be a whole number"]),
        # What is built says itself what it takes, upstream's and ours.
        (GATED['GatedResNetV1d'], dict(depth=50, widths=3), ['x.widths=3 must be a dict or None']),
        (
            GATED['GatedResNetV1d'],
            dict(tint=1),
            ["GatedResNetV1d has no argument 'tint'; it has gate, .*; .* type='Gated', backbone="],
        ),
        (
            BudgetHook,
            dict(target='half', reach='x', cap='x', pull='x'),
            [f'x.{name}=' for name in ('target', 'reach', 'cap', 'pull')],
        ),
        # What hooks hand on to others, and what they give these themselves.
        (
            BudgetHook,
            dict(flor=0.1, steps=3, backbone='neck', log_interval=1),
            ["BudgetHook has no argument 'flor'; did you mean 'floor'", "argument 'steps'"],
        ),
        (
            FGCHook,
            dict(layers=[-1], tau=0.1, bank_dtype='float16', eta=dict(value=1), seed=1),
            [],
        ),
        (
            FGCHook,
            dict(taus=0.1, tau='low', shared=1, labels=None, device='cpu'),
            ["'taus'; did you mean 'tau'", 'x.tau=', 'x.shared=1 must', "'labels'", "'device'"],
        ),
        (Mine, dict(mine=1, target=0.5, floor=0.1, log_interval=1), []),
        (Resize, dict(scale='64'), []),  # hints of others may be loose
        (Resize, dict(scales=64), ["x.scales=64: Resize has no argument 'scales'; did you mean"]),
        (Shared2FCBBoxHead, dict(anything=1), []),  # takes any, and may drop some
        (dict, dict(anything=1), []),
    ],
)
def test_faults(cls, given, expected):
    found = argument_faults(cls, given, 'x')
    assert len(found) == len(expected)
    for words, fault in zip(expected, found, strict=True):
        assert all(word in fault for word in words.split('.*')), found


@pytest.mark.parametrize(
    ('value', 'hint', 'fitting', 'words'),
    [
        (1, int, True, 'a whole number'),
        (True, int, False, 'a whole number'),
        (1, float, True, 'a number'),
        ('1', float, False, 'a number'),
        (None, Optional[float], True, 'a number or None'),
        ([1, 'a'], Union[str, int, Sequence[Union[str, int]]], True, None),
        ([1.5], Sequence[int], False, 'a list (a whole number each)'),
        ('ab', Sequence[str], False, 'a list (a text each)'),
        ({}, Mapping[str, int], True, 'a dict'),
        (3, dict, False, 'a dict'),
        ('b', Literal['a', 'b'], True, "'a' or 'b'"),
        ('c', Literal['a', 'b'], False, "'a' or 'b'"),
        (object(), Any, True, None),
        ('float16', Union[str, torch.dtype], True, 'a text or dtype'),
    ],
)
def test_types(value, hint, fitting, words):
    assert fits(value, hint) is fitting
    assert words is None or describe(hint) == words
