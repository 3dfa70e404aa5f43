# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Other strides for a MobileNetV2 that is built."""

import pytest
import torch
from mmengine.registry import MODELS

import fgc_mm  # noqa: F401

CIFAR = dict(stem_stride=1, strides=(1, 1, 2, 2, 1, 2, 1))


def build(scope, **options):
    return MODELS.build(
        dict(type=f'{scope}.GatedMobileNetV2', widen_factor=0.25, gate=None, **options)
    )


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmdet', 'mmseg'])
def test_divides_as_upstream_with_these_strides_would(scope):
    """Against upstream's class with other settings, shortcuts included."""
    plain = MODELS.get(f'{scope}.MobileNetV2')
    settings = plain.arch_settings
    if scope == 'mmseg':  # takes strides itself
        upstream = plain(widen_factor=0.25, out_indices=(1, 3, 6), strides=CIFAR['strides'])
    else:
        strided = [[*row[:3], s] for row, s in zip(settings, CIFAR['strides'], strict=True)]
        upstream = type('Strided', (plain,), dict(arch_settings=strided))(
            widen_factor=0.25, out_indices=(1, 3, 6)
        )
    upstream.conv1.conv.stride = (1, 1)
    ours = build(scope, out_indices=(1, 3, 6), **CIFAR)
    ours.load_state_dict(upstream.state_dict())
    x = torch.randn(2, 3, 32, 32)
    ours.eval(), upstream.eval()
    with torch.no_grad():
        outs = ours(x)
        assert [out.shape[-1] for out in outs] == [32, 8, 4]
        for out, wanted in zip(outs, upstream(x), strict=True):
            assert torch.equal(out, wanted)


def test_the_shortcut_follows_the_stride():
    """At a quarter of the width the second stage has as many channels as the first."""
    assert not build('mmpretrain').layer2[0].use_res_connect
    assert build('mmpretrain', **CIFAR).layer2[0].use_res_connect


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(strides=(1, 2)), r'strides=\(1, 2\) must be 7 values of 1 or 2'),
        (dict(strides=(1, 3, 1, 1, 1, 1, 1)), 'must be 7 values of 1 or 2'),
        (dict(stem_stride=4), 'stem_stride=4 must be 1 or 2'),
        (dict(stem_strid=1), "no argument 'stem_strid' .did you mean 'stem_stride'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build('mmdet', **options)
