# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Running the tools as a user does, but inside the test's process."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from forget import forget_runs
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

PROJECT = Path(__file__).parents[2]
# A demo config shrunk to two steps, by --cfg-options alone.
SHORT = [
    'train_cfg.max_epochs=1',
    'train_dataloader.dataset.indices=4',
    'train_dataloader.batch_size=2',
    'val_dataloader.dataset.indices=4',
    'test_dataloader.dataset.indices=4',
    'default_hooks.checkpoint.interval=1',
]
SPLITS = ('train', 'val', 'test')
KINDS = {
    'faster_rcnn_r18_digits': 'detection',
    'pspnet_r18_digits': 'segmentation',
    'resnet18_digits': 'classification',
}


@pytest.fixture
def short_options(demo_root):
    """Options that make a demo config small and read the shared demo data."""

    def options(config, *more):
        kind = next(kind for name, kind in KINDS.items() if Path(config).stem.startswith(name))
        root = f'{demo_root}/{kind}/' + ('VOCdevkit/' if kind == 'detection' else '')
        roots = [f'{split}_dataloader.dataset.data_root={root}' for split in SPLITS]
        return ['--cfg-options', *SHORT, *roots, f'demo_data.root={demo_root}', *more]

    return options


@pytest.fixture
def demo_checkpoint(monkeypatch):
    """Writes weights of a demo model whose gates depend on the picture."""
    monkeypatch.chdir(PROJECT)

    def write(name, path):
        cfg = Config.fromfile(f'configs/demo/{name}.py')
        import_modules_from_strings(cfg.default_scope)
        torch.manual_seed(0)
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            import_modules_from_strings(f'{cfg.default_scope}.models')
            model = MODELS.build(cfg.model)
        model.init_weights()
        for module in model.modules():
            # Else the gated branches add nothing, and how they were computed does not matter.
            if isinstance(module, nn.BatchNorm2d) and not module.weight.any():
                nn.init.uniform_(module.weight, 0.3, 0.7)
        for gate in find_gates(model).values():
            nn.init.normal_(gate.fc2.weight, std=2)
            nn.init.zeros_(gate.fc2.bias)
        torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=3)), path)

    return write


@pytest.fixture
def run_tool(monkeypatch, capfd):
    """Call ``tools/<name>.py`` with arguments; the exit code, stdout and stderr."""

    def run(name, *args):
        # A tool is a process of its own: nothing of an earlier one's is there.
        forget_runs()
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, args)])
        try:
            script = next(PROJECT.glob(f'*s/{name}.py'))  # of tools/ or experiments/
            runpy.run_path(str(script), run_name='__main__')
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err

    monkeypatch.chdir(PROJECT)
    return run


@pytest.fixture
def trained(run_tool, short_options, tmp_path):
    """``trained(config)``: the checkpoint of two steps."""

    def train(config, *more):
        options = short_options(config, *more)
        code, _, err = run_tool('train', config, '--work-dir', tmp_path / 'work', *options)
        assert code == 0, err
        return str(tmp_path / 'work' / 'epoch_1.pth')

    return train
