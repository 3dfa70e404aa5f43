# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Sparse execution notices what changes, and layers that are more than they seem."""

import copy
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from mmcv.cnn import fuse_conv_bn
from sparse_networks import assert_equal_outputs, build, pictures

from fgc_mm.inference import enable_sparse, kernels
from fgc_mm.inference.folding import FoldedLayer
from fgc_mm.inference.stamp import checks

pytestmark = pytest.mark.usefixtures('without_gradients')


def change_in_place(model):
    model.layer3[0].conv2.weight.mul_(1.5)


def change_through_data(model):
    model.layer3[0].bn1.bias.data.add_(0.3)


def change_statistics(model):
    model.layer2[0].downsample[1].running_var.mul_(2)


def replace_data(model):
    model.conv1.weight.data = model.conv1.weight.data * 0.7


def replace_parameter(model):
    model.layer4[1].conv1.weight = nn.Parameter(model.layer4[1].conv1.weight * 1.3)


def load(model):
    model.load_state_dict({key: value * 1.01 for key, value in model.state_dict().items()})


def change_one_row(model):
    model.layer3[0].conv2.weight.data[5].zero_()


def change_one_input_channel(model):
    model.layer4[0].conv1.weight.data[:, 25].mul_(5)


def change_one_bias(model):
    model.layer2[0].bn2.bias.data[5].add_(3)


def change_one_bias_of_a_gate(model):
    model.layer2[0].gate1.fc2.bias.data[5].fill_(9.0)


def change_one_row_of_a_gate(model):
    model.layer2[0].gate1.fc2.weight.data[3].mul_(-8)


def replace_modules(model):
    fuse_conv_bn(model)  # norms become nn.Identity, convolutions keep their module


def replace_a_gate(model):
    model.layer2[0].gate1 = copy.deepcopy(model.layer2[0].gate1)
    model.layer2[0].gate1.fc2.weight.data.neg_()


def replace_a_block(model):
    model.layer4[0] = copy.deepcopy(model.layer4[0])
    model.layer4[0].conv1.weight.data.mul_(1.3)


def change_eps(model):
    model.layer3[0].bn1.eps = 1.0


def change_eps_of_the_stem(model):
    model.bn1.eps = 1.0


def prune_a_layer(layer):
    torch.manual_seed(0)
    nn.utils.prune.random_unstructured(layer, 'weight', 0.5)
    layer.weight_orig.mul_(1.5)  # what is multiplied with the mask before each pass


def prune_a_convolution(model):
    prune_a_layer(model.layer3[0].conv2)


def prune_the_stem(model):
    prune_a_layer(model.conv1)


def prune_a_gate(model):
    prune_a_layer(model.layer1[0].gate1.fc2)


def prune_a_norm(model):
    prune_a_layer(model.layer3[0].bn1)


class Negative(nn.Module):
    def forward(self, weight):
        return -weight


def parametrize_a_convolution(model):
    nn.utils.parametrize.register_parametrization(model.layer3[0].conv2, 'weight', Negative())


def give_a_gate_a_bias(model):
    model.layer1[0].gate1.fc1.bias = nn.Parameter(torch.full((16,), 3.0))


def leave_out_statistics(model):
    model.layer3[0].bn1.running_mean = model.layer3[0].bn1.running_var = None


CHANGES = [
    change_eps,
    change_eps_of_the_stem,
    prune_a_convolution,
    prune_the_stem,
    prune_a_gate,
    prune_a_norm,
    parametrize_a_convolution,
    give_a_gate_a_bias,
    leave_out_statistics,
    change_one_row,
    change_one_input_channel,
    change_one_bias,
    change_one_bias_of_a_gate,
    change_one_row_of_a_gate,
    replace_modules,
    replace_a_gate,
    replace_a_block,
    change_in_place,
    change_through_data,
    change_statistics,
    replace_data,
    replace_parameter,
    load,
]


@pytest.mark.parametrize('change', CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_noticed(change):
    masked, sparse = build(), enable_sparse(build())
    x = pictures(2)
    before = sparse(x)
    for model in (masked, sparse):
        change(model)
    wanted = masked(x)
    if change is not replace_modules:
        pairs = zip(wanted, before, strict=True)
        assert any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in pairs)
    for _ in range(2):
        assert_equal_outputs(sparse(x), wanted)
    if change.__name__.startswith('prune'):
        for model in (masked, sparse):
            for name, tensor in model.named_parameters():
                if name.endswith('weight_orig'):
                    tensor.mul_(-1)
        assert_equal_outputs(sparse(x), masked(x))


def test_weights_are_noticed_in_a_part_that_was_prepared_again():
    masked, sparse = build(), enable_sparse(build())
    enable_sparse(sparse.layer3, way='groups')
    x = pictures(2)
    sparse(x)
    for model in (masked, sparse):
        change_in_place(model)
    assert_equal_outputs(sparse(x), masked(x))


def test_weights_in_channels_last_are_watched():
    masked, sparse = build(), build().to(memory_format=torch.channels_last)
    enable_sparse(sparse)
    x = pictures(1)
    sparse(x)
    for model in (masked, sparse):
        model.layer3[0].conv2.weight.data.copy_(model.layer3[0].conv2.weight.data * 1.5)
    assert_equal_outputs(sparse(x), masked(x))


def test_weights_another_thread_prepares_while_they_are_packed(monkeypatch):
    """What is packed belongs to the weights it was made of, not to newer ones."""
    conv, norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16).eval()
    layer = FoldedLayer(conv, norm, channels_last=True)
    x = torch.randn(1, 16, 20, 20).contiguous(memory_format=torch.channels_last)
    layer.refresh()
    monkeypatch.setattr(checks, 'done', True)
    old, fits, meanwhile = norm(conv(x)), kernels.fits, []

    def change():
        with torch.no_grad():
            conv.weight.mul_(2)
            layer.refresh()

    def changing(x):  # is asked after the weights were read, before they are packed
        if not meanwhile:
            meanwhile.append(threading.Thread(target=change))
            meanwhile[0].start()
            meanwhile[0].join()
        return fits(x)

    monkeypatch.setattr(kernels, 'fits', changing)
    assert_equal_outputs([layer.run(x)], [old])
    assert meanwhile
    assert_equal_outputs([layer.run(x)], [norm(conv(x))])


class ActiveNorm(nn.BatchNorm2d):
    """A norm that does more."""

    def forward(self, x):
        return super().forward(x).abs()


@pytest.mark.parametrize('what', ['pruned', 'norm', 'patched'])
def test_layers_that_are_more_than_they_seem(what):
    masked = build()
    block = masked.layer2[0]
    if what == 'pruned':
        nn.utils.prune.random_unstructured(block.conv1, 'weight', 0.5)
    elif what == 'norm':
        active = ActiveNorm(block.bn1.num_features)
        active.load_state_dict(block.bn1.state_dict())
        block.bn1 = active.eval()
    else:
        inner = block.conv1
        inner.forward = lambda x: nn.Conv2d.forward(inner, x) * 2
    x = pictures(2)
    wanted = masked(x)
    assert_equal_outputs(enable_sparse(masked)(x), wanted)


def test_constant_weights_are_looked_at_in_the_first_passes_only(monkeypatch):
    masked, model = build(), enable_sparse(build(), constant=True)
    x = pictures(2)
    for _ in range(3):
        assert_equal_outputs(model(x), masked(x))
    looked = []
    monkeypatch.setattr('fgc_mm.inference.stamp.Stamp.holds', lambda self: looked.append(self))
    assert_equal_outputs(model(x), masked(x))
    assert not looked
    monkeypatch.undo()
    # A copy looks again, and in training it is masked.
    assert_equal_outputs(copy.deepcopy(model)(x), masked(x))
    for each in (model, masked):
        each.train()
    with torch.enable_grad():
        torch.manual_seed(0)
        wanted = masked(x)
        torch.manual_seed(0)
        for out, want in zip(model(x), wanted, strict=True):
            assert torch.equal(out, want)
    # Asked for again, it is prepared from the statistics of now.
    assert_equal_outputs(enable_sparse(model).eval()(x), masked.eval()(x))
