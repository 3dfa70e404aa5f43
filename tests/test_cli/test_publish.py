# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""`fgc publish`; test_infer.py uses what it writes."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_publishing_takes_the_averaged_weights(run_tool, trained, tmp_path):
    config = tmp_path / 'resnet18_digits_ema.py'
    base = ROOT / 'configs/demo/resnet18_digits.py'
    config.write_text(f"_base_ = '{base}'\ncustom_hooks = [dict(type='EMAHook', momentum=0.5)]\n")
    checkpoint = torch.load(source := trained(config), weights_only=False)
    assert 'ema_state_dict' in checkpoint and 'optimizer' in checkpoint
    key = 'backbone.conv1.weight'
    averaged = checkpoint['state_dict'][key]
    current = checkpoint['ema_state_dict'][f'module.{key}']
    assert not torch.equal(averaged, current)
    for options, expected in (([], averaged), (['--no-ema'], current)):
        code, out, err = run_tool('publish', source, tmp_path / 'ema.pth', *options)
        assert code == 0, err
        file = re.match(r'(.*-[0-9a-f]{8}\.pth): ', out)[1]
        content = torch.load(file, weights_only=True)
        assert torch.equal(content['state_dict'][key], expected)
        assert 'ema_state_dict' not in content


@pytest.mark.parametrize(
    ('content', 'options', 'message'),
    [
        (b'hello', [], 'cannot be read as a checkpoint'),
        (dict(meta={}), [], 'holds no weights'),
        (dict(state_dict=dict(a=torch.ones(1))), ['--no-ema'], 'has no `ema_state_dict`'),
    ],
)
def test_what_cannot_be_published(content, options, message, run_tool, tmp_path):
    source = tmp_path / 'in.pth'
    source.write_bytes(content) if isinstance(content, bytes) else torch.save(content, source)
    target = tmp_path / 'public'
    target.mkdir()
    code, _, err = run_tool('publish', source, target / 'out.pth', *options)
    assert code == 2 and f'error: {source}' in err and message in err
    assert not list(target.iterdir())


def test_a_writer_that_fails_leaves_nothing(monkeypatch, tmp_path):
    """The disk is full in the middle: the older publication stays, no half file is left."""
    from fgc_mm.runtime.checkpoints import publish as module

    torch.save(dict(state_dict=dict(a=torch.ones(1))), tmp_path / 'in.pth')
    older = module.publish(tmp_path / 'in.pth', tmp_path / 'out' / 'net.pth')

    def full(content, file):
        file.write(b'half')
        raise OSError('No space left on device')

    monkeypatch.setattr(module.torch, 'save', full)
    with pytest.raises(OSError, match='No space'):
        module.publish(tmp_path / 'in.pth', tmp_path / 'out' / 'net.pth')
    assert list((tmp_path / 'out').iterdir()) == [older]
