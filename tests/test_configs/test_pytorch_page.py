# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The loop on docs/pytorch.md, as it stands there, on a torchvision and a timm network."""

import re
from pathlib import Path

import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset

PAGE = (Path(__file__).parents[2] / 'docs/pytorch.md').read_text()
LOOP = re.search(r'```python\n(import .*?)```', PAGE, re.DOTALL)[1]
NETWORK = re.search(r'^net = (.*)  # or (timm.*)$', LOOP, re.MULTILINE)


class Pictures(Dataset):
    """Classes are told by the color."""

    def __init__(self, n=24):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, 32, 32, generator=generator)
        for i in range(n):
            self.images[i, i % 3] += 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 3, index


def test_the_page_is_short():
    assert len(LOOP.splitlines()) <= 30
    assert len(PAGE.split()) <= 400


@pytest.mark.parametrize('network', NETWORK.groups())
def test_the_loop_ends_at_the_budget(network, capsys):
    torch.manual_seed(0)
    dataset = Pictures()
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    scope = dict(dataset=dataset, loader=loader, epochs=14, timm=timm)
    exec(LOOP.replace(NETWORK[0], f'net = {network}'), scope)
    assert float(capsys.readouterr().out) == pytest.approx(0.5, abs=0.05)
    assert scope['budget'].iteration == 42
    assert scope['coupling'].epochs == 14
    # Every bank row has been written, and the coupled gates are those of the last stage.
    assert all('layer4' in name for name in scope['coupling'].layers)
    assert type(scope['net']).__module__.startswith(network.split('.')[0])
