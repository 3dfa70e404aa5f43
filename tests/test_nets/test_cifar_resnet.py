# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""GatedResNetCifar against a literal computation of the same network."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.nets import GatedResNetCifar, ResNetCifar


def by_gate(masks):
    """Masks of blocks by the names of their gates."""
    return {f'gates.{block.replace(".", "-")}-conv1': mask for block, mask in masks.items()}


def randomize(model, seed=0):
    """Every parameter and statistic away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.dtype != torch.float32:
                continue
            noise = torch.rand(value.shape, generator=generator)
            if name.endswith('running_mean') or name.endswith('bias'):
                value.copy_(noise * 0.6 - 0.3)
            elif value.dim() == 1:
                value.copy_(noise + 0.5)
            else:
                fan_in = value[0].numel()
                value.copy_((noise * 2 - 1) * (3 / fan_in) ** 0.5)


class Reference:
    """The network written out over a state dict.

    ``masks`` are by block name; a block without a mask decides by its gate in
    the state dict, and a block without either is dense.
    """

    def __init__(self, state_dict, training, masks=None):
        self.weights = {key: value.clone() for key, value in state_dict.items()}
        self.training = training
        self.masks = masks or {}

    def bn(self, name, x):
        mean, var, weight, bias = (
            self.weights[f'{name}.{key}']
            for key in ('running_mean', 'running_var', 'weight', 'bias')
        )
        return F.batch_norm(x, mean, var, weight, bias, self.training, 0.1, 1e-5)

    def gate(self, name, x):
        if name in self.masks:
            return self.masks[name]
        gate = f'gates.{name}-conv1'.replace('.', '-').replace('-', '.', 1)
        if f'{gate}.fc1.weight' not in self.weights:
            return None
        hidden = x.mean((2, 3)) @ self.weights[f'{gate}.fc1.weight'].t()
        hidden = F.relu(self.bn(f'{gate}.norm', hidden))
        logits = hidden @ self.weights[f'{gate}.fc2.weight'].t() + self.weights[f'{gate}.fc2.bias']
        return (torch.sigmoid(logits) > 0.5).float()

    def block(self, name, x, stride):
        out = F.conv2d(x, self.weights[f'{name}.conv1.weight'], stride=stride, padding=1)
        out = F.relu(self.bn(f'{name}.bn1', out))
        mask = self.gate(name, x)
        if mask is not None:
            out = out * mask[:, :, None, None]
        out = F.conv2d(out, self.weights[f'{name}.conv2.weight'], padding=1)
        out = self.bn(f'{name}.bn2', out)
        planes = out.size(1)
        if planes != x.size(1):
            x = x[:, :, ::2, ::2]
            zeros = x.new_zeros(x.size(0), planes // 4, x.size(2), x.size(3))
            x = torch.cat([zeros, x, zeros], dim=1)
        return F.relu(out + x)

    def __call__(self, x, blocks):
        x = F.relu(self.bn('bn1', F.conv2d(x, self.weights['conv1.weight'], padding=1)))
        outs = []
        for stage in (1, 2, 3):
            for i in range(blocks):
                x = self.block(f'layer{stage}.{i}', x, 2 if stage > 1 and i == 0 else 1)
            outs.append(x)
        return outs


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
@pytest.mark.parametrize(('depth', 'blocks'), [(20, 3), (32, 5), (44, 7), (56, 9), (110, 18)])
def test_open_gates_equal_the_dense_network(depth, blocks, training):
    model = GatedResNetCifar(depth, out_indices=(0, 1, 2))
    model.train(training)
    randomize(model)
    x = torch.randn(3, 3, 16, 16)
    reference = Reference(
        {key: value for key, value in model.state_dict().items() if not key.startswith('gates.')},
        training,
    )
    expected = reference(x, blocks)
    with torch.no_grad(), force_gates(model, 1.0):
        outs = model(x)
    assert [tuple(out.shape[1:]) for out in outs] == [(16, 16, 16), (32, 8, 8), (64, 4, 4)]
    for out, wanted in zip(outs, expected, strict=True):
        assert (out - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())
    for key, value in model.state_dict().items():
        if 'running' in key and not key.startswith('gates.'):
            torch.testing.assert_close(value, reference.weights[key], msg=key)


def test_the_mask_stands_after_norm_and_relu_of_conv1():
    model = GatedResNetCifar(20)
    randomize(model)
    masks = {
        gate.block: (torch.rand(2, gate.channels) > 0.5).float()
        for gate in find_gates(model).values()
    }
    x = torch.randn(2, 3, 16, 16)
    expected = Reference(model.state_dict(), True, masks)(x, 3)[-1]
    with torch.no_grad(), force_gates(model, by_gate(masks)):
        (out,) = model(x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_gates_decide_from_the_block_input():
    model = GatedResNetCifar(20).eval()
    randomize(model)
    x = torch.randn(4, 3, 16, 16)
    expected = Reference(model.state_dict(), False)(x, 3)[-1]
    with torch.no_grad():
        (out,) = model(x)
    masks = torch.cat([gate.record.mask.flatten() for gate in find_gates(model).values()])
    assert 0.1 < masks.mean() < 0.9
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_names_are_those_of_the_public_weights():
    norm = ('weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked')
    names = ['conv1.weight', *(f'bn1.{key}' for key in norm)]
    for block in (f'layer{stage}.{i}' for stage in (1, 2, 3) for i in range(3)):
        for i in (1, 2):
            names += [f'{block}.conv{i}.weight', *(f'{block}.bn{i}.{key}' for key in norm)]
    model = GatedResNetCifar(20)
    assert [key for key in model.state_dict() if not key.startswith('gates.')] == names
    assert list(GatedResNetCifar(20, gate=None).state_dict()) == names
    # 0.27 M, table 6 of arXiv 1512.03385, less the classifier of 650.
    dense = sum(p.numel() for k, p in model.named_parameters() if not k.startswith('gates.'))
    assert dense + 650 == 269_722


def test_classifier_of_mmpretrain():
    from mmpretrain.registry import MODELS as CLASSIFIERS
    from mmpretrain.structures import DataSample

    model = CLASSIFIERS.build(
        dict(
            type='ImageClassifier',
            backbone=dict(type='GatedResNetCifar', depth=20),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
        )
    )
    assert isinstance(model.backbone, ResNetCifar) and find_gates(model.backbone)
    x = torch.rand(2, 3, 32, 32)
    assert model(x, mode='tensor').shape == (2, 10)
    samples = [DataSample().set_gt_label(label) for label in (3, 7)]
    model(x, samples, mode='loss')['loss'].backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(depth=18), 'ResNetCifar: depth=18 must be one of 20, 32, 44, 56, 110'),
        (dict(depth=20, out_indices=(3,)), r'out_indices=\(3,\) must be some of \(0, 1, 2\)'),
        (dict(depth=20, out_indices=()), r'out_indices=\(\) must be some of'),
        (dict(depth=20, frozen_stages=4), 'frozen_stages=4 must be from -1 .none. to 3'),
        (dict(depth=20, gated_blocks=['layer3.3']), "'layer3.3' names no block"),
        (
            dict(depth=20, gated_convs=['conv2']),
            r"gated_convs=\['conv2'\]: .* is no site; .* conv1",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(type='GatedResNetCifar', **options))
