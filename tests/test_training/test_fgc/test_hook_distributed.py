# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling in two processes, through tools/train.py."""

import shutil

import pytest
import torch
from two_processes import results_of_ranks, train_in_two_processes

from fgc_mm.coupling import LayerCoupling
from fgc_mm.runtime.checkpoints.companions import read_companion

GATES = ['backbone.gates.layer3-1-conv1', 'backbone.gates.layer3-2-conv1']

# What every rank writes down, in a module the config imports.
RECORDER = """
import hashlib, os
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.structures import BaseDataElement
from fgc_mm.runtime import unwrap
from fgc_mm.training import FGCHook
from fgc_mm.coupling.batch import collect_batch
from fgc_mm.training.fgc.samples import read_samples
from fgc_mm.gates import find_gates

def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()

@HOOKS.register_module()
class Recorder(Hook):
    priority = 'VERY_LOW'

    def before_train(self, runner):
        self.steps, self.logits = [], {}
        self.hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        unwrap(runner.model).register_forward_hook(self.keep)

    def keep(self, model, args, out):
        for name in self.hook.coupling.layers:
            self.logits[name] = find_gates(model)[name].record.logits
            self.logits[name].retain_grad()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = unwrap(runner.model)
        gates = find_gates(model)
        layers = self.hook.coupling.layers.values()
        banks = [b.data for c in layers for b in (c.feature_bank, c.gate_bank)]
        self.steps.append(dict(
            indices=torch.tensor([s.instance_idx for s in data_batch['data_samples']]),
            feature={n: gates[n].record.feature for n in self.logits},
            logits={n: a.detach() for n, a in self.logits.items()},
            grad={n: a.grad for n, a in self.logits.items()},
            loss=outputs['loss_fgc'].detach(),
            banks=digest(banks),
            meters=digest(m.last for m in self.hook.coupling.meters.values()),
            weights=digest(model.parameters()),
            seen=self.hook.coupling.seen,
        ))

    def after_train(self, runner):
        # At last a batch that only rank 1 cannot read.
        records = {n: g.record for n, g in find_gates(unwrap(runner.model)).items()}
        size = len(next(iter(records.values())).logits)
        for record in records.values():  # the last pass was a validation
            record.feature = torch.zeros_like(record.logits)
        samples = [BaseDataElement(metainfo=dict(instance_idx=0)) for _ in range(size)]
        try:
            shown = [None] * size if get_rank() else samples
            collect_batch(records, lambda: read_samples(shown, False))
        except Exception as error:
            self.steps[-1]['error'] = f'{type(error).__name__}: {error}'
        torch.save(self.steps, os.path.join(runner.work_dir, f'rank{get_rank()}.pth'))
"""


@pytest.fixture
def launch(digits_cfg, tmp_path):
    """``launch(work_dir, *arguments, **changes)`` -> what the two ranks wrote down."""
    (tmp_path / 'fgc_recorder.py').write_text(RECORDER)
    # 41 pictures: 21 and 20 for the ranks, in batches of 8, 8, 5 and 8, 8, 4.
    shutil.copy(tmp_path / 'pictures/0/0.png', tmp_path / 'pictures/0/x.png')
    hook = dict(type='FGCHook', layers=[-2, -1], k=5, eta=0.1, form='log_sum', log_interval=2)
    cfg = digits_cfg(
        [hook, dict(type='Recorder')],
        max_epochs=2,
        custom_imports=dict(imports=['fgc_mm', 'fgc_recorder']),
        **{
            'train_dataloader.sampler.round_up': False,
            'train_dataloader.batch_size': 8,
            # Whatever reaches the logits of a gate is the gradient of loss_fgc.
            'model.head.loss': dict(type='CrossEntropyLoss', loss_weight=0.0),
        },
    )

    def run(work_dir, *arguments):
        done = train_in_two_processes(cfg, tmp_path, *arguments, work_dir=work_dir)
        return results_of_ranks(done, work_dir / 'rank{}.pth')

    return run


def test_two_ranks(launch, tmp_path):
    ranks = launch(tmp_path / 'run')

    # Equal, bit for bit, after every step of two epochs with uneven last batches.
    assert [len(steps) for steps in ranks] == [6, 6]
    for mine, others in zip(*ranks, strict=True):
        for key in ('banks', 'meters', 'weights', 'seen'):
            assert mine[key] == others[key]
    assert len({step['banks'] for step in ranks[0]}) == 6
    assert [[len(s['indices']) for s in steps] for steps in ranks] == [[8, 8, 5] * 2, [8, 8, 4] * 2]
    assert ranks[0][-1]['seen'] == 82
    seen = torch.cat([step['indices'] for steps in ranks for step in steps[:3]])
    assert seen.sort().values.tolist() == list(range(41))

    # One process, fed the same features in the same global batches.
    how = dict(k=5, form='log_sum')
    layers = {name: LayerCoupling(41, 64, seed=i, **how) for i, name in enumerate(GATES)}
    for steps in zip(*ranks, strict=True):
        indices = torch.cat([step['indices'] for step in steps])
        total = torch.zeros(())
        logits = {}
        for name, layer in layers.items():
            feature = torch.cat([step['feature'][name] for step in steps])
            logits[name] = torch.cat([step['logits'][name] for step in steps]).requires_grad_()
            total = total + 0.1 * layer.step(feature, logits[name], indices).loss
        total.backward()
        # DDP takes the mean over the ranks, of gradients and thus of losses.
        mean = torch.stack([step['loss'] for step in steps]).mean()
        torch.testing.assert_close(mean, total.detach(), rtol=1e-5, atol=1e-6)
        for name in GATES[-1:]:  # the other one's logits also feed this one's input
            grad = torch.cat([step['grad'][name] for step in steps]) / 2
            torch.testing.assert_close(grad, logits[name].grad, rtol=1e-4, atol=1e-7)
    saved = read_companion(str(tmp_path / 'run' / 'epoch_2.banks.pth'))['layers']
    for name, layer in layers.items():
        for kind, bank in (('feature', layer.feature_bank), ('gate', layer.gate_bank)):
            torch.testing.assert_close(saved[name][kind]['data'], bank.data, rtol=0, atol=1e-6)

    # None is left waiting for one that cannot go on.
    assert 'RunError: rank 1 cannot read its batch' in ranks[0][-1]['error']
    assert (
        "UsageError: data sample 0 of this batch has no 'instance_idx'" in (ranks[1][-1]['error'])
    )


@pytest.mark.slow
def test_two_ranks_resume(launch, tmp_path):
    """After the first epoch, every rank with its own random states."""
    ranks = launch(tmp_path / 'run')
    again = launch(tmp_path / 'again', '--resume', str(tmp_path / 'run' / 'epoch_1.pth'))
    for steps, resumed in zip(ranks, again, strict=True):
        for key in ('banks', 'meters', 'weights', 'seen'):
            assert [step[key] for step in steps[3:]] == [step[key] for step in resumed]
    # Their last batches were of different sizes, so these do differ.
    saved = torch.load(tmp_path / 'run' / 'epoch_1.pth', weights_only=False)['random_states']
    assert not torch.equal(*(state['torch'] for state in saved['ranks']))
