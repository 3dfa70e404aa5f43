# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One call from a network to a gated one, what it says of networks it cannot gate, and
``torch.export`` as a second opinion."""

import inspect
import operator

import pytest
import torch
import torch.nn as nn
import torchvision

import fgc_mm
from fgc_mm.errors import UsageError
from fgc_mm.gates import find_gates
from fgc_mm.sites import find_sites


class ByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.b(self.a(x)) if x.mean() > 0.5 else self.b(self.a(x) * 2)


NETWORKS = {
    'nothing to gate': (nn.Sequential(nn.ReLU()), (1, 3, 4, 4), 'no convolution and no linear'),
    'one layer': (nn.Conv2d(3, 4, 1), (1, 3, 4, 4), 'it is an output of the network'),
    'another example': (nn.Conv2d(3, 4, 1), (1, 5, 4, 4), r'example of shape \(1, 5, 4, 4\)'),
    'values': (ByValue(), (1, 3, 4, 4), 'depends on the values of its input'),
}


@pytest.mark.parametrize('name', NETWORKS)
def test_networks_that_cannot_be_gated_say_why(name):
    network, shape, said = NETWORKS[name]
    with pytest.raises(UsageError, match=said):
        fgc_mm.gate(network, torch.rand(shape))
    assert not hasattr(network, 'gates')


def test_an_example_that_is_none():
    with pytest.raises(UsageError, match='must be a tensor, a list of arguments or a dict'):
        fgc_mm.gate(nn.Conv2d(3, 4, 1), None)


def test_named_arguments():
    class Named(ByValue):
        def forward(self, *, picture, scale=1):
            return self.b(self.a(picture) * scale)

    net = fgc_mm.gate(Named(), dict(picture=torch.rand(1, 3, 4, 4), scale=2), sites=['a'])
    assert list(find_gates(net)) == ['gates.a']


def consumers_by_export(net, example):
    """Layer -> the layers its output reaches by operations on single channels alone, by the graph
    of ``torch.export``; layers whose output goes anywhere else are left out."""
    graph = torch.export.export(net, (example,), strict=False).graph
    steps = {'relu', 'relu_', 'hardtanh', 'hardtanh_', 'max_pool2d', 'batch_norm', 'dropout',
             'adaptive_avg_pool2d', 'avg_pool2d'}  # fmt: skip

    def kind(node):
        if node.op != 'call_function' or node.target is operator.getitem:
            return node.op
        return str(node.target).split('.')[1]

    def owner(node):
        return next(reversed(node.meta['nn_module_stack'].values()))[0]

    found = {}
    for node in graph.nodes:
        if kind(node) != 'conv2d' or node.args[-1:] == (node.meta['val'].shape[1],):
            continue
        if len(node.args) > 6 and node.args[6] > 1:
            continue
        reached, open_ = [], [node]
        while open_ is not None and open_:
            for user in list(open_.pop().users):
                grouped = kind(user) == 'conv2d' and len(user.args) > 6 and user.args[6] > 1
                if kind(user) == 'conv2d' and not grouped:
                    reached.append(owner(user))
                elif kind(user) in steps or grouped:
                    open_.append(user)
                else:
                    open_ = None
                    break
            if open_ is None:
                break
        if open_ is not None:
            found[owner(node)] = set(reached)
    return found


# What torch 2.1 exports does not say which module an operation is of.
NAMES_MODULES = 'strict' in inspect.signature(torch.export.export).parameters


@pytest.mark.parametrize('name', ['resnet18', 'resnet50', 'mobilenet_v2'] if NAMES_MODULES else [])
def test_the_graph_of_export_agrees(name):
    net = getattr(torchvision.models, name)(num_classes=4).eval()
    example = torch.rand(1, 3, 64, 64)
    ours = {
        site.name: {end.module for end in site.consumers}
        for site in find_sites(net, example).sites
        if isinstance(net.get_submodule(site.consumers[0].module), nn.Conv2d)
    }
    theirs = consumers_by_export(net, example)
    assert ours == theirs
