# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Real files: those of trainings are loaded, those that would leave a marker behind are not."""

import contextlib
import io
import os
import pickle
import warnings

import malicious
import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, Runner, checkpoint
from mmengine.runner.checkpoint import load_checkpoint

from fgc_mm.errors import CheckpointError
from fgc_mm.runtime.untrusted import loading, safe_types
from fgc_mm.runtime.untrusted.config_text import find_code
from fgc_mm.runtime.untrusted.loading import guarded_loading


@pytest.fixture
def guarded():
    with guarded_loading():
        yield


@pytest.fixture
def marker(tmp_path):
    """Where malicious files leave their mark, if they can."""
    yield (path := tmp_path / 'marker')
    assert not path.exists()


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu', logger='silent')


SCHEDULERS = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2),
    dict(type='MultiStepLR', milestones=[1, 2]),
    dict(type='CosineAnnealingLR', T_max=3),
    dict(type='OneCycleLR', eta_max=0.1, total_steps=9),
    dict(type='ReduceOnPlateauLR', monitor='score', rule='greater'),
]


def test_checkpoints_of_real_trainings(digits_cfg, tmp_path, guarded):
    """With everything a Runner writes: buffers of the log, schedulers, EMA, random states."""
    hooks = [dict(type='FGCHook', layers=[-1], k=5), dict(type='BudgetHook', target=0.5)]
    hooks += [dict(type='EMAHook'), dict(type='BatchShapingHook')]
    loader = digits_cfg().train_dataloader
    cfg = digits_cfg(
        hooks,
        max_epochs=2,
        param_scheduler=SCHEDULERS,
        optim_wrapper=dict(optimizer=dict(_delete_=True, type='AdamW', lr=0.01)),
        val_dataloader={**loader, 'sampler': dict(type='DefaultSampler', shuffle=False)},
        val_cfg=dict(),
        val_evaluator=dict(type='Accuracy', topk=1),
        **{'default_hooks.checkpoint': dict(max_keep_ckpts=1, save_best='auto')},
    )
    cfg.param_scheduler[-1].monitor = 'accuracy/top1'
    Runner.from_cfg(cfg).train()
    content = load(tmp_path / 'run' / 'epoch_2.pth')
    assert isinstance(content['message_hub']['log_scalars']['train/loss'], HistoryBuffer)
    assert len(content['param_schedulers']) == len(SCHEDULERS)
    assert {'optimizer', 'ema_state_dict', 'random_states', 'fgc', 'budget'} <= set(content)
    assert content['meta']['cfg'] == cfg.pretty_text
    cfg.merge_from_dict({'resume': True, 'train_cfg.max_epochs': 3})
    resumed = Runner.from_cfg(cfg)
    resumed.train()
    assert resumed.epoch == 3


def test_what_else_checkpoints_are_made_of(tmp_path, guarded):
    content = dict(
        scalars=[np.float64(1.5), np.float32(2), np.int64(3), np.bool_(True)],
        arrays=[np.arange(3), np.array(['a', 'bc']), np.zeros((2, 2), np.float16)],
        others=({1, 2}, slice(1, 2), range(3), 1 + 2j, b'bytes', torch.float32),
        tensors=[torch.nn.Parameter(torch.ones(2)), torch.Size([1, 2]), torch.zeros(1).half()],
        device=torch.device('cpu'),
    )
    for old in (False, True):
        torch.save(content, tmp_path / 'a.pth', _use_new_zipfile_serialization=not old)
        loaded = load(tmp_path / 'a.pth')
        assert loaded['others'] == content['others'] and loaded['scalars'] == content['scalars']
        assert loaded['arrays'][1].tolist() == ['a', 'bc']
        assert torch.equal(loaded['tensors'][0], torch.ones(2))


def test_names_of_both_numpy_versions(tmp_path, guarded):
    for core in (b'numpy.core', b'numpy._core'):
        content = pickle.dumps(dict(a=np.float64(1.5), b=np.arange(2)), protocol=2)
        for name in (b'numpy._core', b'numpy.core'):
            content = content.replace(b'c' + name + b'.multiarray', b'c' + core + b'.multiarray')
        assert core + b'.multiarray' in content
        stored = safe_types.load(io.BytesIO(content))
        assert stored['a'] == 1.5 and stored['b'].tolist() == [0, 1]
        assert f'{core.decode()}.multiarray.scalar' in safe_types.safe_types()


@pytest.mark.parametrize('way', ['by_pickle', 'by_attributes', 'by_config', 'by_cfg'])
@pytest.mark.parametrize('old', [False, True])
def test_a_file_that_would_run_code(way, old, tmp_path, marker, guarded):
    weights = dict(state_dict=dict(weight=torch.ones(1, 1), bias=torch.ones(1)))
    content = getattr(malicious, way)(weights, marker)
    torch.save(content, path := tmp_path / 'bad.pth', _use_new_zipfile_serialization=not old)
    named = dict(by_pickle='os.makedirs', by_attributes=r'getattr\(HistoryBuffer,__init__\)').get(
        way, 'line 2, __import__'
    )
    with pytest.raises(CheckpointError, match=f'bad.pth was not loaded: .*{named}') as error:
        load(path)
    assert '--trust-checkpoint if you trust' in str(error.value)
    # The same by those who ask for it otherwise.
    model = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError):
        load_checkpoint(model, str(path))
    with pytest.raises(CheckpointError), open(path, 'rb') as file:
        torch.load(file, weights_only=False)
    with pytest.raises(CheckpointError):
        torch.hub.load_state_dict_from_url(path.as_uri(), model_dir=str(tmp_path / 'hub'))


def test_further_ways_to_run_code(tmp_path, marker, guarded):
    (tmp_path / 'raw.pth').write_bytes(pickle.dumps(malicious.Bomb(marker), 2))
    malicious.write_tar(tmp_path / 'tar.pth', marker)
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / 'script.pth')
    named = dict(raw='makedirs', tar='a tar archive', script='a TorchScript program')
    for name, what in named.items():
        with pytest.raises(CheckpointError, match=what):
            load(tmp_path / f'{name}.pth')
        with pytest.raises(CheckpointError, match=what):
            torch.load(io.BytesIO((tmp_path / f'{name}.pth').read_bytes()))
    # Protocols torch does not write: refused, in whatever words.
    warnings.simplefilter('ignore')
    for protocol in (3, 4, 5):
        (tmp_path / 'new.pth').write_bytes(pickle.dumps(malicious.Bomb(marker), protocol))
        with pytest.raises(CheckpointError):
            load(tmp_path / 'new.pth')


def test_objects_are_not_given_a_state(tmp_path, guarded):
    """A state for what is no plain data: a function's would replace its code."""
    function = b'ctorch._utils\n_rebuild_tensor_v2\n'
    state = b'}(U\x01aK\x01u'
    (tmp_path / 'state.pth').write_bytes(b'\x80\x02' + function + state + b'b.')
    with pytest.raises(CheckpointError):
        load(tmp_path / 'state.pth')
    assert not hasattr(torch._utils._rebuild_tensor_v2, 'a')


@pytest.mark.parametrize('content', [b'', b'hello', b'\x80', b'PK\x03\x04 cut off'])
def test_damaged_files(content, tmp_path, guarded):
    (tmp_path / 'damaged.pth').write_bytes(content)
    with pytest.raises(CheckpointError, match='is damaged or no checkpoint'):
        load(tmp_path / 'damaged.pth')
    with pytest.raises(FileNotFoundError):
        load(tmp_path / 'missing.pth')
    torch.save(torch.ones(9999), tmp_path / 'half.pth')
    (tmp_path / 'half.pth').write_bytes((tmp_path / 'half.pth').read_bytes()[:5000])
    with pytest.raises(CheckpointError, match='is damaged or no checkpoint'):
        load(tmp_path / 'half.pth')


def test_the_files_are_real(tmp_path):
    """What is refused above runs where it is not, by mmengine's own list of safe types too."""
    torch.save(malicious.by_attributes({}, tmp_path / 'marker'), tmp_path / 'bad.pth')
    options = dict(weights_only=False)
    own = contextlib.nullcontext()
    if hasattr(checkpoint, 'get_torch_safe_globals'):  # the maintained line
        options['weights_only'] = True
        own = torch.serialization.safe_globals(checkpoint.get_torch_safe_globals())
    with own, pytest.raises(AttributeError, match='as_subclass'):
        torch.load(tmp_path / 'bad.pth', **options)
    assert (tmp_path / 'marker').is_file()


def test_trusted_files_and_the_end_of_the_guard(tmp_path):
    assert torch.load is loading._torch_load
    torch.save(malicious.by_config({}, tmp_path / 'a'), tmp_path / 'config.pth')
    torch.save(malicious.by_pickle({}, tmp_path / 'marker'), tmp_path / 'bad.pth')
    with guarded_loading(trust=True):
        assert '__import__' in load(tmp_path / 'config.pth')['meta']['config']
        load(tmp_path / 'bad.pth')
    assert (tmp_path / 'marker').is_dir()
    with guarded_loading(), pytest.raises(CheckpointError):
        load(tmp_path / 'bad.pth')
    assert torch.load is torch.serialization.load is loading._torch_load


def test_nothing_is_left_of_an_old_config(tmp_path, guarded):
    """mmcv wrote it, resuming runs it, and it may name modules to import."""
    text = "custom_imports = dict(imports=['this_is_not_there'])\ngpu_ids = range(0, 4)\n"
    torch.save(dict(meta=dict(config=text, cfg=text)), tmp_path / 'old.pth')
    assert load(tmp_path / 'old.pth')['meta'] == dict(config='', cfg=text)


def test_who_asks_torch_for_weights_alone_gets_them(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '1')
    torch.save(dict(a=torch.ones(1), b=np.float64(2)), tmp_path / 'a.pth')
    with guarded_loading():
        assert load(tmp_path / 'a.pth') == dict(a=torch.ones(1), b=2.0)
    assert os.environ['TORCH_FORCE_WEIGHTS_ONLY_LOAD'] == '1'


@pytest.mark.parametrize(
    'text',
    [
        'import os',
        'a = [i for i in (1, 2)]',
        "a = f'{open(1)}'",
        "a = open('x', 'w')",
        'a = eval\nb = a(1)',
        'a = dict(b=[1, dict(c=print(1))])',
        'a = dict(*[print(1)])',
        'a = [].__class__',
        'a = __builtins__',
        'a = lambda: 1',
        'a = 1\na.b = 2',
        'a = dict\nb = a(c=1)',
        'def a():\n    pass',
        'with read_base():\n    from .x import *',
        'a = (b := 1)',
        'a = _base_.pop(1)',
        "a = '{{ $HOME:1 }}'",
        "{{ fileDirname }} or print('x')",
    ],
)
def test_code_in_a_config_is_found(text):
    assert find_code(text) is not None


@pytest.mark.parametrize(
    'text',
    [
        '',
        "'''About.'''\na = 1\nb = dict(c=[-1, 2.5, None, True, 'x'], d=('a', ), e={'f-g': {1, 2}})",
        'a = torch.float32\nb = array([1, 2])\nc = inf\nd = range(0, 8)\ne = dict',
        'a = <object at 0x7f>',
    ],
)
def test_plain_configs_are_none(text):
    assert find_code(text) is None


def test_the_configs_that_come_along_are_plain():
    from pathlib import Path

    from mmengine.config import Config

    root = Path(__file__).parents[3] / 'configs'
    files = [root / 'demo' / f'{name}_fgc.py' for name in ('resnet18_digits',)]
    files.append(root / 'faster_rcnn_r50_fgc_voc.py')
    for file in files:
        assert find_code(Config.fromfile(file).pretty_text) is None, file


def test_nothing_changes_for_who_only_imports_it():
    import fgc_mm  # noqa: F401

    assert torch.load.__module__ == 'torch.serialization' and os.path.exists(torch.__file__)
