# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One index for every picture of a training set, the same in every epoch and run."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
from torch.utils.data import DataLoader

from ..errors import UsageError
from ..tasks import class_fields
from .mixing import children_of, refuse_mixing

INSTANCE_KEY = 'instance_idx'

_OWN_INDEX = (
    f'or let its data samples carry a metainfo {INSTANCE_KEY!r} of your own and tell FGCHook '
    'num_instances'
)


class InstanceIndex(NamedTuple):
    """What is known about the instances of a training set.

    Attributes:
        num_instances (int): N, how many different pictures there are.
        num_items (int): How many items the datasets list; more than N if
            pictures are listed several times.
        labels (np.ndarray, optional): The class of every instance, if every
            item of the datasets has exactly one (``gt_label`` of classification).
    """

    num_instances: int
    num_items: int
    labels: Optional[np.ndarray]


def install_instance_index(
    loader: DataLoader, loop: Any = None, mixes: bool = False
) -> InstanceIndex:
    """Let every item of a training loader carry ``instance_idx`` in its metainfo.

    Indices run from 0 to N - 1 over all datasets below ``ConcatDataset``,
    ``RepeatDataset``, ``ClassBalancedDataset``, ``KFoldDataset`` and their
    nestings, in the order they are listed there. They depend on nothing else:
    not on epoch, worker, rank, shuffling or restart. An item that is repeated,
    by a wrapper or because its picture is listed twice, has one index; pictures
    are told apart by ``img_path`` or, where there is none, by the whole
    annotation. An item that replaces a broken one brings its own index.

    The index is written behind the pipeline, into the packed data sample. So it
    needs no ``meta_keys``, and survives hooks that exchange the pipeline.

    Call it before the first item is loaded; it may be called again. Workers that
    have started already are started anew.
    """
    if not mixes:
        refuse_mixing(loader.dataset)
    leaves = _leaves(loader.dataset)
    keys, labels = _scan(leaves)
    number: dict[bytes, int] = {}  # in the order of appearance
    instances = np.array([number.setdefault(key, len(number)) for key in keys], np.int64)
    start = 0
    for leaf in leaves:
        leaf.prepare_data = _Stamping(leaf, instances[start : start + len(leaf)])
        start += len(leaf)
    _stamp_behind_wrappers(loader.dataset)
    _restart_workers(loader, loop)
    known = np.full(len(number), -1)
    known[instances[::-1]] = labels[::-1]  # that of the first item
    return InstanceIndex(
        num_instances=len(number),
        num_items=len(keys),
        labels=known if len(known) and known.min() >= 0 else None,
    )


def count_instances(dataset: Any) -> int:
    """How many different pictures a training set has.

    For a dataset whose items cannot be told apart that is its length.
    """
    try:
        return len(set(_scan(_leaves(dataset))[0]))
    except UsageError:
        return len(dataset)


class _Stamping:
    """``prepare_data`` of a dataset that adds the instance index to what it makes."""

    def __init__(self, dataset: Any, instances: np.ndarray) -> None:
        self.dataset = dataset
        self.instances = instances

    def __call__(self, idx: Any) -> Any:
        if isinstance(idx, tuple):
            raise UsageError(
                f'{type(self.dataset).__name__} is indexed by {idx!r}: videos have no instance '
                'index; train on single pictures'
            )
        data = type(self.dataset).prepare_data(self.dataset, idx)
        if data is not None:  # otherwise the dataset will ask for another item
            _stamp(data, int(self.instances[idx]))
        return data


class _Packing:
    """The last transform of a wrapper such as ``MultiImageMixDataset``, which packs itself."""

    def __init__(self, pack: Any) -> None:
        self.pack = pack

    def __call__(self, results: dict) -> Any:
        instance = results.get(INSTANCE_KEY)
        data = self.pack(results)
        if instance is not None:
            _stamp(data, instance)
        return data


def _stamp(data: Any, instance: int) -> None:
    sample = data.get('data_samples') if isinstance(data, Mapping) else None
    if sample is not None and hasattr(sample, 'set_metainfo'):
        sample.set_metainfo({INSTANCE_KEY: instance})
    elif sample is None and isinstance(data, dict):  # to be packed by a wrapper
        data[INSTANCE_KEY] = instance


def _stamp_behind_wrappers(dataset: Any) -> None:
    pipeline: Any = getattr(dataset, '__dict__', {}).get('pipeline')
    if isinstance(pipeline, list) and not hasattr(type(dataset), 'prepare_data'):
        pipeline[-1:] = [p if isinstance(p, _Packing) else _Packing(p) for p in pipeline[-1:]]
    for child in children_of(dataset):
        _stamp_behind_wrappers(child)


def _leaves(dataset: Any) -> list[Any]:
    """The datasets that load items, without the wrappers around them, each once."""
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    if hasattr(type(dataset), 'prepare_data'):
        return [dataset]
    children = children_of(dataset)
    if not children:
        raise UsageError(
            f'{type(dataset).__name__} has no `prepare_data` of mmengine.dataset.BaseDataset, so '
            f'its items cannot be given an instance index; derive it from BaseDataset, {_OWN_INDEX}'
        )
    found = {id(leaf): leaf for child in children for leaf in _leaves(child)}
    return list(found.values())


def _scan(leaves: list[Any]) -> tuple[list[bytes], np.ndarray]:
    """A 64 bit digest of every item's picture, and its label or -1."""
    keys, labels, fields = [], [], class_fields()
    for number, leaf in enumerate(leaves):
        for i, info in enumerate(infos_of(leaf)):
            keys.append(hashlib.blake2b(_picture(info, number, i), digest_size=8).digest())
            own = info if isinstance(info, Mapping) else {}
            label = np.asarray(next((own[field] for field in fields if field in own), None))
            single = label.size == 1 and np.issubdtype(label.dtype, np.integer)
            labels.append(int(label.item()) if single else -1)
    return keys, np.array(labels, np.int64)


def infos_of(leaf: Any) -> Iterator[Any]:
    listed = getattr(leaf, 'data_list', None)
    if listed and len(listed) == len(leaf):
        yield from listed
        return
    for i in range(len(leaf)):
        yield leaf.get_data_info(i) if hasattr(leaf, 'get_data_info') else None


def _picture(info: Any, number: int, i: int) -> bytes:
    if isinstance(info, Mapping):
        path = info.get('img_path')
        if isinstance(path, str) and path:
            return path.encode(errors='surrogateescape')
        try:
            return pickle.dumps({k: v for k, v in info.items() if k != 'sample_idx'}, protocol=4)
        except (pickle.PicklingError, TypeError, AttributeError):
            pass
    return f'{number}/{i}'.encode()


def _restart_workers(loader: DataLoader, loop: Any) -> None:
    """Workers hold a copy of the dataset as it was when they started."""
    if getattr(loader, '_iterator', None) is not None:  # persistent workers
        loader._iterator = None
    # Some mmengine start the workers of an iteration-based loop when it is built.
    running: Any = getattr(loop, 'dataloader_iterator', None)
    if loader.num_workers and getattr(running, '_iterator', None) is not None:
        sampler: Any = loader.sampler
        if hasattr(sampler, '_indices_of_rank'):
            # The workers were sent the first batches already.
            sampler.indices = sampler._indices_of_rank()
        running._iterator = iter(loader)
