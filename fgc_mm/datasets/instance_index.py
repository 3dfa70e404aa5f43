# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One index for every picture of a training set, the same in every epoch and run."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

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


@dataclass(frozen=True)
class InstanceIndex:
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
    labels: Optional[np.ndarray] = None


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
    if hasattr(loader.dataset, 'full_init'):
        loader.dataset.full_init()
    leaves = _leaves(loader.dataset)
    keys, labels = _scan(leaves)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    # np.unique sorts by key; what counts is the order of appearance.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    instances = rank[inverse.reshape(-1)]
    start = 0
    for leaf in leaves:
        leaf.prepare_data = _Stamping(leaf, instances[start : start + len(leaf)])
        start += len(leaf)
    _stamp_behind_wrappers(loader.dataset)
    _restart_workers(loader, loop)
    known = labels[np.sort(first)]
    return InstanceIndex(
        num_instances=len(first),
        num_items=len(keys),
        labels=known if len(known) and known.min() >= 0 else None,
    )


def count_instances(dataset: Any) -> int:
    """How many different pictures a training set has.

    Returns:
        int: N as in :class:`InstanceIndex`; for a dataset whose items cannot be
        told apart, its length.
    """
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    try:
        leaves = _leaves(dataset)
    except UsageError:
        return len(dataset)
    return len(np.unique(_scan(leaves)[0]))


class _Stamping:
    """``prepare_data`` of a dataset that adds the instance index to what it makes."""

    def __init__(self, dataset: Any, instances: np.ndarray) -> None:
        self.dataset = dataset
        first = int(instances[0]) if len(instances) else 0
        in_order = np.array_equal(instances, np.arange(first, first + len(instances)))
        self.first = first
        self.length = len(instances)
        self.table = None if in_order else instances

    def __call__(self, idx: int) -> Any:
        data = type(self.dataset).prepare_data(self.dataset, idx)
        if data is None:  # the dataset will ask for another item
            return None
        _stamp(data, self.instance(idx))
        return data

    def instance(self, idx: Any) -> int:
        if isinstance(idx, tuple):
            raise UsageError(
                f'{type(self.dataset).__name__} is indexed by {idx!r}: videos have no instance '
                'index; train on single pictures'
            )
        idx = int(idx) + (self.length if idx < 0 else 0)
        return self.first + idx if self.table is None else int(self.table[idx])


class _Packing:
    """The last transform of a wrapper with a pipeline of its own, such as ``MultiImageMixDataset``:
    what a leaf gave is packed there."""

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


def _scan(leaves: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """A 64 bit digest of every item's picture, and its label or -1."""
    keys, labels, fields = [], [], class_fields()
    for number, leaf in enumerate(leaves):
        for i, info in enumerate(infos_of(leaf)):
            digest = hashlib.blake2b(_picture(info, number, i), digest_size=8).digest()
            keys.append(int.from_bytes(digest, 'little'))
            own = info if isinstance(info, Mapping) else {}
            label = next((own[field] for field in fields if field in own), None)
            if isinstance(label, (list, tuple, np.ndarray)) and np.size(label) == 1:
                label = np.asarray(label).item()
            single = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
            labels.append(int(label) if single else -1)  # type: ignore[arg-type]
    return np.array(keys, dtype=np.uint64), np.array(labels, dtype=np.int64)


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
