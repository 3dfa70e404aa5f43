# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The table of sites, of networks with gates and without."""

import re

import pytest
import torch
from command_line import PROJECT
from mmengine.analysis import FlopAnalyzer
from mmengine.config import Config
from mmengine.registry import MODELS

DENSE = 'configs/demo/resnet18_digits.py'
WHOLE = """
_base_ = {base!r}
model = dict(_delete_=True, type='Gated', model=_base_.model, part=('rpn_head', 'roi_head'))
"""


def rows(text):
    """First and last cell of each line of a table."""
    lines = [re.split(r'\s{2,}', line.strip()) for line in text.splitlines() if '  ' in line]
    return {line[0]: line for line in lines}


def test_a_backbone_without_gates(run_tool):
    code, text, err = run_tool('sites', DENSE, '--example', '64', '64')
    assert code == 0, err
    found = rows(text)
    assert 'backbone (ResNet), 8 sites' in text
    assert found['layer1.0.conv1'][1:4] == ['layer1.0', 'layer1.0.conv2', '16']
    assert found['layer1.0.conv2'][-1] == 'it is added to another tensor (in layer1.0)'
    whole = re.search(r'all 8 sites have 480 channels and touch ([\d.]+) % .*; ([\d.]+) %', text)
    # Both layers of each block, and nothing else.
    cfg = Config.fromfile(DENSE).model.backbone
    backbone = MODELS.build({**cfg, 'type': 'mmpretrain.ResNet'})
    analyzer = FlopAnalyzer(backbone, torch.zeros(1, 3, 64, 64)).unsupported_ops_warnings(False)
    flops = analyzer.uncalled_modules_warnings(False).by_module()
    blocks = sum(n for name, n in flops.items() if re.fullmatch(r'layer\d\.\d\.conv\d', name))
    layers = sum(flops[n] for n, m in backbone.named_modules() if isinstance(m, torch.nn.Conv2d))
    touched = 100 * blocks / layers
    assert float(whole[1]) == pytest.approx(touched, abs=0.06)
    assert float(whole[2]) == pytest.approx(100 - touched / 2, abs=0.06)
    assert 'gated' not in text


def test_a_detector_with_gates_in_its_heads(run_tool, tmp_path):
    config = tmp_path / 'whole.py'
    config.write_text(WHOLE.format(base=str(PROJECT / 'configs/demo/faster_rcnn_r18_digits.py')))
    parts = ('neck', 'rpn_head', 'roi_head')
    code, text, err = run_tool('sites', config, '--part', *parts, '--example', '96', '128')
    assert code == 0, err
    found = rows(text)
    assert found['rpn_conv'][1:4] == ['rpn_conv', 'rpn_cls, rpn_reg', '64 x 5 calls']
    assert found['bbox_head.shared_fcs.0'][-1] == found['rpn_conv'][-1] == 'gated'
    assert 'neck (FPN), 0 sites' in text
    assert 'RoIAlign' in found['fpn_convs.0.conv'][-1]
    assert 'roi_head: the 2 with gates have 512 channels' in text
    assert re.search(r'FasterRCNN: 3 sites touch [\d.]+ % of its MACs', text)
    assert 'MACs are those of one picture of 96 x 128' in text
