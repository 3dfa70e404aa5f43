# Dense Faster R-CNN + FPN, ResNet-50.
_base_ = ['mmdet::_base_/models/faster-rcnn_r50_fpn.py', '_base_/voc2007.py']
model = dict(roi_head=dict(bbox_head=dict(num_classes=20)))
