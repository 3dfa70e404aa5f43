# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .annotations import BrokenAnnotationError, check_boxes, dataset_fault, xml_fault
from .broken import (
    BrokenDataError,
    BrokenPictureError,
    label_fault,
    name_broken_pictures,
    picture_fault,
)
from .check import check_dataset_paths
from .cifar_binary import CIFARBinary
from .demo import DEMO_KINDS, DIGIT_CLASSES, SEG_CLASSES, SEG_PALETTE, ensure_demo_data
from .instance_index import (
    INSTANCE_KEY,
    InstanceIndex,
    count_instances,
    install_instance_index,
    refuse_mixing,
)

__all__ = [
    'DEMO_KINDS',
    'DIGIT_CLASSES',
    'INSTANCE_KEY',
    'SEG_CLASSES',
    'SEG_PALETTE',
    'BrokenAnnotationError',
    'BrokenDataError',
    'BrokenPictureError',
    'CIFARBinary',
    'InstanceIndex',
    'check_boxes',
    'check_dataset_paths',
    'count_instances',
    'dataset_fault',
    'ensure_demo_data',
    'install_instance_index',
    'label_fault',
    'name_broken_pictures',
    'picture_fault',
    'refuse_mixing',
    'xml_fault',
]
