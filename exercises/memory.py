"""Bytes that are alive, counted by storage: for gate M."""

from collections.abc import Iterable

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of all storages that tensors lie in: views of one buffer count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Within, `saved` collects what autograd keeps for backward, but for `but`, as the weights."""

    def __init__(self, but: Iterable[Tensor] = ()) -> None:
        self.saved: list[Tensor] = []
        self.but = {tensor.untyped_storage().data_ptr() for tensor in but}
        super().__init__(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "SavedTensors":
        super().__enter__()
        return self

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.but:
            self.saved.append(tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return storage_bytes(self.saved)
