# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Stock models of all tasks, gated: two steps with budget and coupling, a test, MACs counted by
hand."""

import functools

import pytest
import torch
import torch.nn as nn
from stock_models import gated, hrnet, make_runner, merged, narrow_regions, stock

from fgc_mm.gates import find_gates

RESNET = dict(depth=18, base_channels=8, stem_channels=8)
HOOKS = [
    dict(type='BudgetHook', target=0.95),
    dict(type='FGCHook', layers=[-1], k=1, num_instances=4, save_banks=False),
    dict(type='GatedMACsHook'),
]


def detector(path, neck, head=None, backbone=(), **changes):
    model = merged(stock('mmdet', path), backbone=dict(backbone), neck=neck, **changes)
    if head is None:
        return narrow_regions(model)
    return merged(model, bbox_head=dict(num_classes=2, stacked_convs=1, **head))


def segmentor(path, backbone, decode_head, auxiliary_head=None, **changes):
    model = stock('mmseg', f'_base_/models/{path}')
    head = dict(num_classes=2, dropout_ratio=0)
    heads = dict(decode_head={**head, **decode_head})
    heads['auxiliary_head'] = {**head, **auxiliary_head} if auxiliary_head else None
    return merged(
        model, backbone=backbone, data_preprocessor=dict(size=(64, 64)), **heads, **changes
    )


def ocrnet():
    model = segmentor(
        'ocrnet_hr18.py', dict(extra=dict(_new=True, **hrnet(4, 8, 16, 32))),
        dict(in_channels=[4, 8, 16, 32], channels=8),
    )  # fmt: skip
    model.decode_head[1].ocr_channels = 8
    return model


def classifier(backbone, channels, pooled=True):
    return dict(
        type='ImageClassifier',
        data_preprocessor=dict(mean=[127.5] * 3, std=[60.0] * 3, num_classes=2),
        backbone=backbone,
        neck=dict(type='GlobalAveragePooling') if pooled else None,
        head=dict(type='LinearClsHead', num_classes=2, in_channels=channels, topk=1),
    )


SMALL = dict(in_channels=8, feat_channels=32)
FPN = dict(in_channels=[8, 16, 32, 64], out_channels=8)
CSP = dict(in_channels=[32, 64, 128], out_channels=16, num_csp_blocks=1)
BISENET = dict(
    detail_channels=(8, 8, 16), semantic_channels=(4, 8, 8, 16), semantic_expansion_ratio=2,
    bga_channels=16,
)  # fmt: skip

# Name -> scope, and what builds the config of the model.
MODELS = {
    'rtmdet': ('mmdet', lambda: detector(
        'rtmdet/rtmdet_tiny_8xb32-300e_coco.py', dict(CSP), dict(in_channels=16, feat_channels=16),
        dict(widen_factor=0.125), data_preprocessor=dict(batch_augments=None))),
    'yolox': ('mmdet', lambda: detector(
        'yolox/yolox_s_8xb8-300e_coco.py', dict(CSP), dict(in_channels=16, feat_channels=16),
        dict(widen_factor=0.125), data_preprocessor=dict(batch_augments=None))),
    'retinanet-regnetx': ('mmdet', lambda: detector(
        'regnet/retinanet_regnetx-800MF_fpn_1x_coco.py',
        dict(in_channels=[32, 64, 160, 384], out_channels=8), dict(SMALL),
        dict(arch='regnetx_400mf'))),
    'atss': ('mmdet', lambda: detector(
        'atss/atss_r50_fpn_1x_coco.py', dict(FPN), dict(SMALL), RESNET)),
    'gfl': ('mmdet', lambda: detector(
        'gfl/gfl_r50_fpn_1x_coco.py', dict(FPN), dict(SMALL), RESNET)),
    'cascade-rcnn': ('mmdet', lambda: detector(
        'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py', dict(FPN), None, RESNET)),
    'mask-rcnn-resnext': ('mmdet', lambda: detector(
        'mask_rcnn/mask-rcnn_x101-32x4d_fpn_1x_coco.py',
        dict(in_channels=[64, 128, 256, 512], out_channels=8), None,
        dict(depth=50, groups=4, base_width=4, base_channels=16, stem_channels=16))),
    'faster-rcnn-hrnet': ('mmdet', lambda: detector(
        'hrnet/faster-rcnn_hrnetv2p-w18-1x_coco.py',
        dict(in_channels=[4, 8, 16, 32], out_channels=8), None,
        dict(extra=dict(_new=True, **hrnet(4, 8, 16, 32))))),
    'fcn': ('mmseg', lambda: segmentor(
        'fcn_r50-d8.py', RESNET, dict(in_channels=64, channels=8),
        dict(in_channels=32, channels=8))),
    'ocrnet': ('mmseg', ocrnet),
    'deeplabv3plus': ('mmseg', lambda: segmentor(
        'deeplabv3plus_r50-d8.py', RESNET,
        dict(in_channels=64, channels=8, c1_in_channels=8, c1_channels=4),
        dict(in_channels=32, channels=8))),
    'segformer': ('mmseg', lambda: segmentor(
        'segformer_mit-b0.py', dict(embed_dims=8, num_layers=[1, 1, 1, 1]),
        dict(in_channels=[8, 16, 40, 64], channels=8))),
    'bisenetv2': ('mmseg', lambda: segmentor(
        'bisenetv2.py', BISENET, dict(in_channels=16, channels=8))),
    'vgg16-bn': ('mmpretrain', lambda: classifier(
        dict(type='VGG', depth=16, norm_cfg=dict(type='BN')), 512)),
    'se-resnet': ('mmpretrain', lambda: classifier(
        dict(type='SEResNet', depth=50, base_channels=4, stem_channels=8, se_ratio=4), 128)),
    'convnext': ('mmpretrain', lambda: classifier(
        dict(type='ConvNeXt', arch=dict(depths=[1, 1, 1, 1], channels=[8, 8, 16, 16])), 16, False)),
    'efficientnet': ('mmpretrain', lambda: classifier(dict(type='EfficientNet', arch='b0'), 1280)),
    'mobilenetv3': ('mmpretrain', lambda: classifier(dict(type='MobileNetV3', arch='small'), 576)),
    'densenet': ('mmpretrain', lambda: classifier(
        dict(type='DenseNet', arch=dict(growth_rate=4, depths=[2, 2], init_channels=8)), 16)),
    'swin': ('mmpretrain', lambda: classifier(
        dict(type='SwinTransformer', img_size=64, pad_small_map=True,
             arch=dict(embed_dims=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2])), 64)),
    'deit': ('mmpretrain', lambda: classifier(
        dict(type='VisionTransformer', img_size=64, patch_size=16,
             arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)),
        16, False)),
    'timm': ('mmpretrain', lambda: classifier(
        dict(type='TIMMBackbone', model_name='resnet10t', pretrained=False), 512)),
}  # fmt: skip


class Literal:
    """MACs of every picture, by the weights that are needed one by one."""

    def __init__(self, network):
        self.gates = network.gates
        self.executed, self.dense = 0, 0
        ends = {}
        for site in self.gates.sites.values():
            gate = self.gates.of(site.name)
            for side, parts in enumerate((site.consumers, (*site.producers, *site.through))):
                for end in parts:
                    ends.setdefault(end.module, ([], []))[side].append((gate, end))
        self.handles = [
            layer.register_forward_hook(functools.partial(self.count, *ends.get(name, ((), ()))))
            for name, layer in network.named_modules()
            if isinstance(layer, (nn.Conv2d, nn.Linear)) and not name.startswith('gates.')
        ] + [
            layer.register_forward_hook(self.count_own)
            for layer in self.gates.modules()
            if isinstance(layer, nn.Linear)
        ]

    def count_own(self, layer, args, out):
        self.executed += out.numel() * layer.in_features

    def count(self, ins, outs, layer, args, out):
        pictures, (width, fan_in) = len(out), layer.weight.shape[:2]
        groups = getattr(layer, 'groups', 1)
        positions = out[0].numel() // width * layer.weight[0, 0].numel()
        self.dense += pictures * positions * layer.weight[:, :, None].shape[0] * fan_in
        for picture in range(pictures):
            needed = torch.ones(width, fan_in)
            for gate, end in outs:
                needed *= self.spread(gate, end, picture)[:, None]
            for gate, end in ins:
                rows = self.spread(gate, end, picture).view(groups, 1, fan_in)
                needed *= rows.expand(groups, width // groups, fan_in).reshape(width, fan_in)
            self.executed += positions * int(needed.sum())

    @staticmethod
    def spread(gate, end, picture):
        mask = gate.record.mask[picture]
        index = range(len(mask)) if end.index is None else end.index
        return torch.tensor([1.0 if i < 0 else float(mask[i]) for i in index])


@pytest.mark.parametrize('name', MODELS)
def test_two_steps_and_a_test(name, tmp_path):
    torch.manual_seed(0)
    scope, config = MODELS[name]
    runner = make_runner(scope, gated(config()), tmp_path, HOOKS)
    gates = find_gates(runner.model.backbone)
    before = {key: gate.fc2.weight.detach().clone() for key, gate in gates.items()}
    runner.train()
    logged = runner.message_hub.log_scalars
    for loss in ('loss', 'loss_budget', 'loss_fgc'):
        found = logged[f'train/{loss}'].data[0]
        assert len(found) == 2 and all(map(torch.isfinite, map(torch.tensor, found))), loss
    moved = [not torch.equal(before[key], gate.fc2.weight) for key, gate in gates.items()]
    # Those of the last layer's pixels alone may have had no gradient.
    assert sum(moved) >= 0.9 * len(moved), [k for k, m in zip(gates, moved, strict=True) if not m]
    for gate in gates.values():
        nn.init.normal_(gate.fc2.weight, std=3)
        nn.init.zeros_(gate.fc2.bias)
    figures = runner.test()

    model = runner.model
    model.eval()
    literal = Literal(model.backbone)
    with torch.no_grad():
        for batch in runner.test_dataloader:
            model.backbone(model.data_preprocessor(batch, False)['inputs'])
    assert figures['macs/backbone_dense_G'] == pytest.approx(literal.dense / 4e9)
    assert figures['macs/backbone_executed_G'] == pytest.approx(literal.executed / 4e9)
    assert 0.1 < figures['gates/openness'] < 0.9
