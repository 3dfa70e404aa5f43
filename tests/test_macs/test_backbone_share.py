# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The share as a function, against the counter of evaluation."""

import pytest
import torch
import torch.nn as nn
from gated_resnets import gated_resnet
from left_hooks import hooks_on
from mmengine.registry import MODELS

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.macs import BackboneShare, count_macs

BACKBONES = {
    'basic': lambda: gated_resnet(18, base_channels=8, stem_channels=8),
    'bottleneck': lambda: gated_resnet(50, base_channels=8, stem_channels=8),
    'depthwise': lambda: MODELS.build(
        dict(type='mmpretrain.GatedMobileNetV2', widen_factor=0.25, out_indices=(3,))
    ),
}


def counted(model, images):
    found = count_macs(model, images, backbone='backbone')
    return [image.backbone_executed / image.backbone_dense for image in found]


@pytest.fixture(params=BACKBONES)
def model(request):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module('backbone', BACKBONES[request.param]())
    for gate in find_gates(model).values():
        nn.init.normal_(gate.fc2.weight)
        nn.init.normal_(gate.fc2.bias)
    return model.eval()


def test_it_counts_as_evaluation_does(model):
    images = torch.randn(3, 3, 40, 32)
    share = BackboneShare(model)
    share.attach()
    with torch.no_grad():
        model(images)
    records = [gate.record for gate in share.gates.values()]
    # Gates behind the last output did not run.
    masks = [torch.zeros(3) if r is None else r.mask.mean(dim=1) for r in records]
    found = share.of(torch.stack(masks, dim=1))
    assert found.tolist() == pytest.approx(counted(model, images), rel=1e-5)
    assert len({round(value, 6) for value in found.tolist()}) > 1

    with force_gates(model, 0.0):
        assert share.minimum() == pytest.approx(counted(model, images)[0], rel=1e-5)
    with force_gates(model, 1.0):
        assert share.minimum(1.0) == pytest.approx(counted(model, images)[0], rel=1e-5)
    share.detach()
    assert not hooks_on(model)


def test_what_it_cannot_do_is_said():
    model = nn.Sequential()
    model.add_module('backbone', gated_resnet(18, base_channels=8))
    with pytest.raises(ValueError, match="backbone='body' is no part of Sequential"):
        BackboneShare(model, 'body')
    with pytest.raises(RuntimeError, match='the backbone has not run'):
        BackboneShare(model).minimum()
