"""Bytes that are alive, counted by storage: for gate M."""

from collections.abc import Iterable

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of all storages that tensors lie in: views of one buffer count once."""
    # A view keeps all of its base's storage alive.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
