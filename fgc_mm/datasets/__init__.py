# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .annotation_checks import check_annotations, check_boxes
from .cifar_binary import CIFARBinary
from .demo.build import DEMO_KINDS, ensure_demo_data
from .demo.digits import DIGIT_CLASSES
from .demo.segmentation import SEG_CLASSES, SEG_PALETTE
from .instance_index import INSTANCE_KEY, count_instances, install_instance_index
from .mixing import find_mixing, mixes, refuse_mixing
from .path_checks import check_dataset_paths
from .picture_checks import name_broken_pictures, picture_fault
from .pictures import PICTURE_ENDINGS, Pictures

__all__ = [
    'DEMO_KINDS',
    'DIGIT_CLASSES',
    'INSTANCE_KEY',
    'PICTURE_ENDINGS',
    'SEG_CLASSES',
    'SEG_PALETTE',
    'CIFARBinary',
    'Pictures',
    'check_annotations',
    'check_boxes',
    'check_dataset_paths',
    'count_instances',
    'ensure_demo_data',
    'find_mixing',
    'install_instance_index',
    'mixes',
    'name_broken_pictures',
    'picture_fault',
    'refuse_mixing',
]
