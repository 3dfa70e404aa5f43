# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""tools/export.py on the demo configs, against the packages' own predictions."""

import json
import os
import sys

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from mmengine.config import Config

import fgc_mm  # noqa: F401

CLASSIFIER, DETECTOR, SEGMENTOR = (
    f'{name}_digits_gated' for name in ('resnet18', 'faster_rcnn_r18', 'pspnet_r18')
)


@pytest.fixture
def exported(run_tool, short_options, demo_checkpoint, tmp_path):
    """Export a demo model; config, checkpoint, session and the tool's output."""

    def run(name, *args):
        config, checkpoint = f'configs/demo/{name}.py', tmp_path / 'model.pth'
        demo_checkpoint(name, checkpoint)
        out = tmp_path / 'model.onnx'
        extra = ('--work-dir', tmp_path / 'w', '--count', 2, *short_options(config))
        code, text, err = run_tool('export', config, checkpoint, '--out', out, *args, *extra)
        assert code == 0, err
        session = onnxruntime.InferenceSession(str(out), providers=['CPUExecutionProvider'])
        return config, checkpoint, session, text

    return run


def first_picture(root, pattern):
    return str(sorted(root.rglob(pattern))[0])


def properties(session):
    return session.get_modelmeta().custom_metadata_map


def test_classifier_with_preprocessing_and_gates(exported, demo_root):
    from mmpretrain.apis import ImageClassificationInferencer

    config, checkpoint, session, text = exported(CLASSIFIER, '--with-preprocess', '--with-gates')
    assert 'Checked       a batch of 2' in text and 'another size (48x80)' in text
    assert 'not exported: softmax' in text
    path = first_picture(demo_root / 'classification' / 'val', '*.png')
    image = cv2.resize(cv2.imread(path), (64, 64))
    pixels = image.transpose(2, 0, 1)[None].astype(np.float32)
    scores, *masks = session.run(None, {'image': pixels})
    (want,) = ImageClassificationInferencer(Config.fromfile(config), str(checkpoint))(path)
    softmax = torch.from_numpy(scores).softmax(dim=1)[0].numpy()
    np.testing.assert_allclose(softmax, want['pred_scores'], atol=1e-4)
    assert len(masks) == 8 and set(np.concatenate(masks, axis=1).flatten()) == {0, 1}
    info = properties(session)
    assert json.loads(info['classes'])[:2] == ['0', '1'] and info['config'] == f'{CLASSIFIER}.py'
    assert info['preprocess_included'] == 'true' and info['bgr_to_rgb'] == 'true'
    assert json.loads(info['mean']) == [127.5] * 3 and json.loads(info['std']) == [64.0] * 3


def test_int8_calibrated_on_the_training_set(exported):
    _, _, session, text = exported(DETECTOR, '--int8', '--calibrate-count', 3)
    assert 'Int8 ' in text and 'on pictures it was not calibrated on' in text
    found = json.loads(properties(session)['int8'])
    assert properties(session)['precision'] == 'int8'
    assert 'rpn_cls_score_0' in found and 0 < max(found.values()) < 0.3


def test_segmentor_at_another_size_as_mmseg_has_it(exported):
    from mmseg.apis import init_model

    config, checkpoint, session, text = exported(SEGMENTOR)
    assert 'Note          not exported: the class of each pixel' in text
    model = init_model(Config.fromfile(config), str(checkpoint), 'cpu')
    x = torch.randn(2, 3, 104, 136)
    (logits,) = session.run(['logits'], {'image': x.numpy()})
    with torch.no_grad():
        wanted = model.predict(x)
    for own, want in zip(logits, wanted, strict=True):
        assert np.abs(own - want.seg_logits.data.numpy()).max() <= 1e-3
    assert json.loads(properties(session)['classes'])[0] == 'background'


def test_detector_features_and_rpn(exported, demo_root, tmp_path):
    from mmdet.apis import init_detector

    picture = first_picture(demo_root / 'detection', '*.jpg')
    config, checkpoint, session, text = exported(DETECTOR, '--image', picture, '--with-preprocess')
    assert 'not exported: the RoI head' in text and 'NMS of the RPN' in text
    assert 'Checked       picture 1 (128x128)' in text
    model = init_detector(Config.fromfile(config), str(checkpoint), device='cpu')
    image = torch.from_numpy(cv2.imread(picture)[:100, :120].transpose(2, 0, 1).copy())
    outs = session.run(None, {'image': image[None].float().numpy()})
    with torch.no_grad():
        data = model.data_preprocessor(dict(inputs=[image], data_samples=None))
        feats = model.extract_feat(data['inputs'])
        scores, boxes = model.rpn_head(feats)
    for out, want in zip(outs, (*feats, *scores, *boxes), strict=True):
        assert np.abs(out - want.numpy()).max() <= 1e-3
    names = [out.name for out in session.get_outputs()]
    assert names[0] == 'feature_0' and names[-1] == f'rpn_bbox_pred_{len(boxes) - 1}'


def test_backbone_as_torchscript(run_tool, short_options, demo_checkpoint, tmp_path):
    config, checkpoint = f'configs/demo/{CLASSIFIER}.py', tmp_path / 'model.pth'
    demo_checkpoint(CLASSIFIER, checkpoint)
    args = ['--part', 'backbone', '--format', 'torchscript', '--work-dir', tmp_path / 'w']
    out = tmp_path / 'backbone.pt'
    more = short_options(config)
    code, _, err = run_tool('export', config, checkpoint, '--out', out, *args, *more)
    assert code == 0, err
    outs = torch.jit.load(str(out))(torch.randn(2, 3, 64, 96))
    assert [tuple(o.shape[2:]) for o in outs][-1] == (2, 3)


def test_mistakes_are_one_message_and_leave_no_file(
    run_tool, short_options, demo_checkpoint, tmp_path, monkeypatch
):
    gated, dense = (f'configs/demo/resnet18_digits{s}.py' for s in ('_gated', ''))
    checkpoint = tmp_path / 'model.pth'
    demo_checkpoint(CLASSIFIER, checkpoint)
    broken = tmp_path / 'broken.pth'
    broken.write_bytes(checkpoint.read_bytes()[:1000])
    picture = tmp_path / 'broken.png'
    picture.write_bytes(b'\x89PNG and then the disk was full')
    out = tmp_path / 'out' / 'model.onnx'
    out.parent.mkdir()
    nowhere = ['--out', tmp_path / 'nowhere' / 'model.onnx']
    pipe, weights_before = tmp_path / 'pipe', checkpoint.read_bytes()
    os.mkfifo(pipe)
    cases = [
        (dense, checkpoint, [], [], 'does not fit the config: '),
        (gated, broken, [], [], 'broken.pth cannot be read'),
        (gated, checkpoint, ['model.backbone.depth=34'], [], 'does not fit the config: '),
        (gated, tmp_path / 'none.pth', [], [], 'none.pth does not exist'),
        (gated, checkpoint, [], nowhere, 'nowhere does not exist'),
        (gated, checkpoint, [], ['--out', out.parent], 'is a folder; name a file in it'),
        (gated, checkpoint, [], ['--out', checkpoint], 'would replace what is read from'),
        (gated, checkpoint, [], ['--out', pipe], 'is no regular file and would be replaced'),
        (gated, checkpoint, [], ['--count', 0], '--count 0 must be at least 1'),
        (gated, checkpoint, [], ['--int8', '--calibrate-count', 0], '--calibrate-count 0 must be'),
        (gated, checkpoint, [], ['--calibrate', 'x'], '--calibrate is for --int8'),
        (gated, checkpoint, [], ['--int8', '--calibrate', 'x.png'], 'x.png is neither a picture'),
        (gated, checkpoint, [], ['--int8', '--opset', 11], '--int8 needs --opset 13 or newer'),
        (gated, checkpoint, [], ['--image', 'none.png'], 'none.png is neither a picture nor'),
        (gated, checkpoint, [], ['--image', picture], 'broken.png (31 bytes) cannot be decoded'),
        (
            gated,
            checkpoint,
            ['test_dataloader.dataset.indices=0'],
            [],
            '_dataloader.dataset has no items',
        ),
    ]
    for config, weights, options, args, message in cases:
        more = ['--work-dir', tmp_path / 'w', *short_options(config, *options)]
        code, _, err = run_tool('export', config, weights, '--out', out, *args, *more)
        assert code == 2 and message in err, err
        assert 'Traceback' not in err
        assert not os.listdir(out.parent)
    assert checkpoint.read_bytes() == weights_before and pipe.is_fifo()
    # A failed check leaves what was there before.
    out.write_text('older')
    monkeypatch.setattr(sys.modules['fgc_mm.inference.export'], 'TOLERANCE', -1)
    more = ['--work-dir', tmp_path / 'w', *short_options(gated)]
    code, _, err = run_tool('export', gated, checkpoint, '--out', out, *more)
    assert code == 2 and 'fails the check: on picture 1' in err
    assert os.listdir(out.parent) == ['model.onnx'] and out.read_text() == 'older'
    assert not (tmp_path / 'nowhere').exists()
