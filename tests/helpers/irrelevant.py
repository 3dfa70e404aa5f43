# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a closed channel must be: exactly irrelevant."""

import contextlib
import copy

import torch
import torch.nn as nn
from mmengine.registry import MODELS
from torch.utils._pytree import tree_flatten

from fgc_mm.gates import Gate, GateRecord, force_gates
from fgc_mm.sites import End, find_sites, gate_sites

GATE = dict(type='BinConcreteGate', norm_cfg=None, bias_init=0.0)


@MODELS.register_module(force=True)
class SilentGate(Gate):
    """Open, and without random numbers: dropout draws what it draws without gates."""

    def __init__(self, in_channels, channels):
        super().__init__(in_channels, channels)
        self.bias = nn.Parameter(torch.zeros(channels))

    def decide(self, pooled):
        mask = torch.ones(len(pooled), self.channels) + self.bias * 0
        return mask, GateRecord(mask, mask, mask.detach())


def flat(value):
    """Tensors of an output."""
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def run(net, example, training=False):
    """Outputs of a network, with the same random numbers each time; its statistics are kept."""
    buffers = {b: b.clone() for b in net.buffers()}
    net.train(training)
    torch.manual_seed(7)
    with torch.no_grad():
        outputs = [t.clone() for t in flat(net(example.clone()))]
        for buffer, before in buffers.items():
            buffer.copy_(before)
    return outputs


def equal(ours, theirs):
    """Whether two lists of tensors are the same, bit by bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def gate_all(net, example, gate=GATE, found=None):
    """Gates with decisions of their own on every site of a network."""
    found = found or find_sites(net, example)
    gates = gate_sites(net, found.sites, gate)
    for part in gates.children():
        if hasattr(part, 'fc2'):
            nn.init.normal_(part.fc2.weight, std=3)
    return gates


@contextlib.contextmanager
def new_weights(net, gates, masks):
    """Random weights for all that only closed channels use: what makes them, what lies between,
    and what reads them. ``masks`` are those of some sites, the same for every image."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, mask in masks.items():
            site = gates.sites[name]
            entries = [(f'{e.module}.{w}', 0, e.index) for e in site.producers + site.through
                       for w in ('weight', 'bias')]  # fmt: skip
            entries += [(s.tensor, s.dim, s.index) for s in site.scales]
            for end in site.consumers:
                module = net.get_submodule(end.module)
                if getattr(module, 'groups', 1) == 1:
                    entries.append((f'{end.module}.weight', 1, end.index))
            for tensor, dim, index in entries:
                if tensor not in tensors or not tensors[tensor].is_floating_point():
                    continue
                rows = tensors[tensor].movedim(dim, 0)
                closed = End(tensor, index).spread(mask[None])[0] == 0
                rows[closed] = 0.5 + torch.rand(rows[closed].shape)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(before[name])


def random_masks(gates, share=0.5, names=None):
    """A mask for each site; at least one channel is closed."""
    masks = {}
    for name in names if names is not None else gates.sites:
        mask = (torch.rand(gates.sites[name].channels) < share).float()
        mask[torch.randint(len(mask), ())] = 0
        masks[name] = mask
    return masks


def forced(gates, masks):
    """``with forced(...)``: the gates of these sites decide so."""
    return force_gates(gates, {gates.name_of(name): mask for name, mask in masks.items()})


def assert_open_is_upstream(build, example, modes=(False, True)):
    """With open gates a network computes what it computes without, bit by bit."""
    torch.manual_seed(1)
    net = build()
    plain = copy.deepcopy(net)
    gates = gate_all(net, example, dict(type='SilentGate'))
    for training in modes:
        assert equal(run(net, example, training), run(plain, example, training)), training
    ours, theirs = net.state_dict(), plain.state_dict()
    assert {k for k in ours if not k.startswith('gates.')} == set(theirs)
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())
    return gates


def assert_closed_is_irrelevant(net, example, gates, rounds=2, modes=(False, True)):
    """New weights for closed channels change nothing; images do not see each other's decisions."""
    names = list(gates.sites)
    for turn in range(rounds):
        chosen = [name for name in names if turn == 0 or torch.rand(()) < 0.5] or names[:1]
        masks = random_masks(gates, names=chosen)
        for training in modes:
            with forced(gates, masks):
                before = run(net, example, training)
                with new_weights(net, gates, masks):
                    after = run(net, example, training)
            assert equal(before, after), (sorted(masks), training)


def assert_images_are_alone(net, example, gates):
    """An image is computed under its own decisions, whoever stands beside it."""
    masks = {
        name: (torch.rand(len(example), site.channels) < 0.5).float()
        for name, site in gates.sites.items()
        if site.calls == 1
    }
    with forced(gates, masks):
        together = run(net, example)
    for i in range(len(example)):
        with forced(gates, {name: mask[i] for name, mask in masks.items()}):
            alone = run(net, example[i : i + 1])
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[i : i + 1], theirs, atol=1e-4, rtol=1e-3)
