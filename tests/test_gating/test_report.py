# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How far two networks predict the same."""

import pytest
import torch
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from fgc_mm.gating.report import format_report
from fgc_mm.tasks import Classification, Detection, Segmentation, Task


def boxes(corners, labels, scores):
    found = InstanceData(
        bboxes=torch.tensor(corners).float().view(-1, 4),
        labels=torch.tensor(labels).long(),
        scores=torch.tensor(scores).float(),
    )
    return BaseDataElement(pred_instances=found)


def test_boxes_agree_if_both_find_them():
    one = [0.0, 0.0, 10.0, 10.0]
    far, near = [50.0, 50.0, 60.0, 60.0], [1.0, 0.0, 10.0, 10.0]
    task = Detection()
    theirs = boxes([one, far], [0, 1], [0.9, 0.8])
    assert task.agreement(theirs, theirs) == (4, 4)
    assert task.agreement(boxes([near], [0], [0.5]), theirs) == (2, 3)
    assert task.agreement(boxes([near], [1], [0.5]), theirs) == (0, 3)  # of another class
    assert task.agreement(boxes([one, near], [0, 0], [0.9, 0.9]), theirs) == (2, 4)  # one each
    assert task.agreement(boxes([one], [0], [0.2]), theirs) == (0, 2)  # below the score
    assert task.agreement(boxes([], [], []), boxes([], [], [])) == (0, 0)


def test_pixels_and_classes():
    def maps(*values):
        return BaseDataElement(pred_sem_seg=PixelData(data=torch.tensor([[values]])))

    def label(value):
        return BaseDataElement(pred_label=torch.tensor([value]))

    assert Segmentation().agreement(maps(1, 2, 3), maps(1, 0, 3)) == (2, 3)
    assert Classification().agreement(label(2), label(2)) == (1, 1)
    assert Classification().agreement(label(2), label(1)) == (0, 1)
    assert Task().agreement(label(2), label(1)) == (0, 0)


@pytest.mark.parametrize('metrics', [{}, dict(dense={'mIoU': 41.3}, gated={'mIoU': 40.9})])
def test_a_report_says_what_is_known(metrics):
    macs = dict(backbone_dense=2, backbone_executed=1, model_dense=3, model_executed=2)
    report = dict(
        macs=macs, share=0.5, milliseconds=dict(dense=10, dense_folded=8, gated=6), pictures=20,
        agreement=0.975, agreement_of='pictures', metrics=metrics, no_metrics='no pictures',
    )  # fmt: skip
    text = format_report(report)
    assert '1 (50.0 %)' in text and '10.00 (8.00 with norms folded)' in text and '97.5 %' in text
    assert ('mIoU' in text and '40.9' in text) if metrics else 'no pictures' in text
    report['agreement'] = None
    assert 'Neither finds anything on the 20 pictures' in format_report(report)
