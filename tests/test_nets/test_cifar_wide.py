# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""GatedWideResNet against a literal computation of the same network."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.nets import GatedWideResNet


def by_gate(masks):
    """Masks of blocks by the names of their gates."""
    return {f'gates.{block.replace(".", "-")}-conv1': mask for block, mask in masks.items()}


def randomize(model, seed=0):
    """Every parameter and statistic away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, low, high in (
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.3, 0.3),
                (module.running_mean, -0.3, 0.3),
                (module.running_var, 0.5, 1.5),
            ):
                value.uniform_(low, high, generator=generator)
        elif isinstance(module, nn.Conv2d):
            bound = (3 / module.weight[0].numel()) ** 0.5
            module.weight.data.uniform_(-bound, bound, generator=generator)


def reference(weights, x, blocks, training, masks=None):
    """The network of arXiv 1605.07146 written out over a state dict."""
    weights = {key: value.clone() for key, value in weights.items()}

    def relu_bn(name, x):
        stats = weights[f'{name}.running_mean'], weights[f'{name}.running_var']
        scale = weights[f'{name}.weight'], weights[f'{name}.bias']
        return F.relu(F.batch_norm(x, *stats, *scale, training, 0.1, 1e-5))

    outs = []
    x = F.conv2d(x, weights['conv1.weight'], padding=1)
    for stage in (1, 2, 3):
        for i in range(blocks):
            name = f'layer{stage}.{i}'
            stride = 2 if stage > 1 and i == 0 else 1
            pre = relu_bn(f'{name}.bn1', x)
            out = F.conv2d(pre, weights[f'{name}.conv1.weight'], stride=stride, padding=1)
            out = relu_bn(f'{name}.bn2', out)
            if masks is not None:
                out = out * masks[name][:, :, None, None]
            out = F.conv2d(out, weights[f'{name}.conv2.weight'], padding=1)
            if f'{name}.shortcut.weight' in weights:
                x = F.conv2d(pre, weights[f'{name}.shortcut.weight'], stride=stride)
            x = x + out
        outs.append(x)
    outs[-1] = relu_bn('bn1', x)
    return outs


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
@pytest.mark.parametrize(('depth', 'widen_factor'), [(10, 1), (16, 2), (28, 1.5)])
def test_equals_the_literal_network(depth, widen_factor, training):
    model = GatedWideResNet(depth, widen_factor, out_indices=(0, 1, 2)).train(training)
    randomize(model)
    dense = {
        key: value for key, value in model.state_dict().items() if not key.startswith('gates.')
    }
    masks = {
        gate.block: (torch.rand(3, gate.channels) > 0.5).float()
        for gate in find_gates(model).values()
    }
    x = torch.randn(3, 3, 16, 16)
    blocks = (depth - 4) // 6
    for forced, kept in ((1.0, None), (by_gate(masks), masks)):
        expected = reference(dense, x, blocks, training, kept)
        with torch.no_grad(), force_gates(model, forced):
            outs = model(x)
        width = int(16 * widen_factor)
        shapes = [(3, width * 2**i, 16 // 2**i, 16 // 2**i) for i in range(3)]
        assert [tuple(out.shape) for out in outs] == shapes
        for out, wanted in zip(outs, expected, strict=True):
            assert (out - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())


def test_names_and_sizes_of_28_10():
    model = GatedWideResNet()
    assert model.feat_dim == 640
    # 36.5 M parameters (table 4 of arXiv 1605.07146), 6,410 of them the classifier.
    dense = sum(p.numel() for name, p in model.named_parameters() if not name.startswith('gates.'))
    assert dense + 6_410 == 36_479_194
    assert len(find_gates(model)) == 12
    shortcuts = [name for name in model.state_dict() if 'shortcut' in name]
    assert shortcuts == [f'layer{i}.0.shortcut.weight' for i in (1, 2, 3)]
    plain = [name for name in model.state_dict() if not name.startswith('gates.')]
    assert list(GatedWideResNet(gate=None).state_dict()) == plain


def test_width_one_needs_no_shortcut_in_the_first_stage():
    names = GatedWideResNet(10, 1).state_dict()
    assert [name for name in names if 'shortcut' in name] == [
        'layer2.0.shortcut.weight',
        'layer3.0.shortcut.weight',
    ]


def test_dropout_stands_between_mask_and_conv2():
    torch.manual_seed(0)
    model = GatedWideResNet(10, 2, dropout=0.4)
    block = model.layer1[0]
    seen = []
    block.conv2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mask = torch.zeros(32)
    mask[:16] = 1
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad(), force_gates(model, {'gates.layer1-0-conv1': mask}):
        model(x)
        model.eval()
        model(x)
    trained, evaluated = seen
    assert (trained[:, 16:] == 0).all() and (evaluated[:, 16:] == 0).all()
    share = [(kept[:, :16] > 0).float().mean().item() for kept in (trained, evaluated)]
    assert share[0] / 0.6 == pytest.approx(share[1], rel=0.15)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(depth=27), 'depth=27 must be 6 n \\+ 4'),
        (dict(depth=4), 'depth=4 must be 6 n \\+ 4'),
        (dict(depth=10, widen_factor=0), 'widen_factor=0 must be at least 1/16'),
        (dict(depth=10, dropout=1.0), r'dropout=1.0 must be within \[0, 1\)'),
        (dict(depth=10, widen_factor=1, out_indices=(-1,)), r'out_indices=\(-1,\) must be'),
        (dict(depth=10, widen_factor=1, frozen_stages=-2), 'frozen_stages=-2 must be from -1'),
        (dict(depth=10, widen_factor=1, gated_blocks=3), 'block index 3 is out of range'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(type='GatedWideResNet', **options))
