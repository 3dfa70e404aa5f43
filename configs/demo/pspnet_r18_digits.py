# PSPNet on a quarter-width ResNet-18, small enough to learn digits on two cores. Strokes are a few
# pixels wide, so no stage after the stem divides the picture any more.
_base_ = [
    'mmseg::_base_/models/pspnet_r50-d8.py',
    '../_base_/digits_segmentation.py'
]
import mmseg  # noqa: E402

# Most pixels are background. mmsegmentation 1.2 cannot weigh classes where some pixels are ignored.
class_weight = None if mmseg.__version__ < '1.3' else [0.2] + [1.0] * 5
model = dict(
    data_preprocessor=dict(size=(128, 128)),
    pretrained=None,
    backbone=dict(
        depth=18,
        base_channels=16,
        stem_channels=16,
        strides=(1, 1, 1, 1),
        dilations=(1, 1, 1, 1),
        zero_init_residual=False),
    decode_head=dict(
        in_channels=128,
        channels=64,
        num_classes=6,
        loss_decode=dict(class_weight=class_weight)),
    auxiliary_head=dict(
        in_channels=64,
        channels=32,
        num_classes=6,
        loss_decode=dict(class_weight=class_weight)))
