"""37 host: a memory that is saved three times moves once

target: extensions.memory.offload:_pack
train: model.offload=2

autograd saves a tensor: return what it keeps in its place. A tensor whose storage has fewer than
LEAST_OFFLOAD bytes, or whose storage's address is in `stays`, stays: return it, but detached, since
what a node keeps must not keep that node alive. All others leave with their whole storage, and each
storage once: `blocks` has the Block of each address. Return a Saved, with the block, the dtype, and
the tensor's place in it: offset, size and stride.
Read: extensions/memory/offload.py.

? Decide by storage whether it stays; else find or make the block of its address.
? tensor.untyped_storage() with nbytes() and data_ptr(), tensor.detach(), blocks.setdefault,
  Block(tensor), Saved, storage_offset(), size(), stride().
? Views of one storage have one address, so a dict by address has each storage once. A view is
  described by three things: where it begins, its size, and its stride. They are one tuple:
  Saved(block, dtype, (offset, size, stride)).
! 1 copy of the input of q, k and v leaves, though each of the 3 saves it. In production:
  Transformer Engine's `get_cpu_offload_context`.
"""

import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks

from exercises.exercise import Case, Dice, draw
from exercises.memory import storage_bytes
from exercises.pictures import bars

LEAST_NUMBERS = 13  # of 8 bytes each, in place of LEAST_OFFLOAD
# All that has left in any case stays alive, since a later tensor could have its address: whether a
# version fails that looks blocks up by address would be chance.
KEPT_ALIVE: list = []


def cases(dice: Dice) -> list[Case]:
    return [Case(1, rows=dice.randint(6, 9), width=2 * dice.randint(3, 5)) for _ in range(2)]


def inputs(case: Case):
    """x, and weights for two products of x and for one of the result."""
    x = draw(case, "x", shape=(case.rows, case.width))
    into = draw(case, "w", 0, shape=(case.width, 2 * case.width)) / 3
    out_of = draw(case, "w", 1, shape=(case.width, case.rows)) / 3
    return [tensor.requires_grad_() for tensor in (x, into, out_of)]


def layer(x, into, out_of):
    """A loss; the comments have what autograd saves for its backward."""
    a, b = (x @ into).chunk(2, -1)  # one storage; both are saved, for the product of both
    mixed = (a * b).T @ x  # a transposed view, and x once more
    scores = (mixed @ out_of).softmax(-1)  # its result
    narrow = scores.float().sin()  # another dtype
    few = narrow[:2].square()  # a small view of a large storage
    small = x.mean(1).exp()  # of so few bytes that it stays
    return few.double().sum() + (narrow.double() ** 2).sum() + small.sum()


def on_rank(rank, case: Case) -> dict:
    offload = rank.course.offload
    offload.LEAST_OFFLOAD = 8 * LEAST_NUMBERS
    leaves, blocks, sizes, packs = inputs(case), {}, [], []
    stays = {weight.data_ptr() for weight in leaves[1:]}

    def pack(tensor):
        packed = offload._pack(blocks, stays, tensor)
        packs.append(packed)
        if not hasattr(packed, "detach"):
            sizes.append(tensor.nbytes)
        return packed

    def unpack(packed):
        tensor = offload._unpack(packed)
        if not hasattr(packed, "detach"):
            room = packed.block.on_device.nbytes
            if tensor.untyped_storage().nbytes() > room:  # torch has added memory of any content
                raise ValueError(f"a tensor of {tensor.dtype} ends behind its {room} bytes")
        return tensor

    with saved_tensors_hooks(pack, unpack):
        loss = layer(*leaves)
    memory, moved = offload.HostMemory("cpu"), list(blocks.values())
    memory.start_out(moved)
    bytes_moved = sum(block.on_host.nbytes for block in moved)
    left = [block.on_device for block in moved]
    KEPT_ALIVE.extend(left)
    for block in moved:
        block.on_device = None
    kept = on_device(packs)
    for tensor in left:
        if tensor.data_ptr() not in {one.untyped_storage().data_ptr() for one in kept}:
            tensor.fill_(255)  # NaN, as other tensors would write into this memory
    memory.start_in(moved)
    loss.backward()
    result = {"loss": loss.detach(), "gradients": [leaf.grad for leaf in leaves]}
    result |= {"saved tensors that leave": len(sizes), "storages that leave": len(moved)}
    result |= {"bytes of these tensors": sum(sizes), "bytes that leave": bytes_moved}
    is_alive = alive(lambda tensor: offload._pack({}, set(), tensor), case)
    edge = offload._pack({}, set(), draw(case, "edge", shape=(LEAST_NUMBERS,)).requires_grad_())
    result["exactly LEAST_OFFLOAD bytes leave"] = not hasattr(edge, "detach")
    whole = draw(case, "whole", shape=(2 * LEAST_NUMBERS,)).requires_grad_()
    of_part, of_whole, of_another = {}, {}, {}
    part = offload._pack(of_part, {whole.data_ptr()}, whole[1:])
    stays = hasattr(part, "detach") and part.data_ptr() == whole[1:].data_ptr()
    result["a part of a weight stays, in its memory"] = stays
    result["what stays is detached"] = getattr(part, "grad_fn", None) is None
    result["blocks of what stays"] = len(of_part)
    for view in (whole[::2], whole, whole.detach().view(torch.int64)):
        offload._pack(of_whole, set(), view)
    result["blocks of one storage, of which three views are saved"] = len(of_whole)
    offload._pack(of_another, set(), whole)
    shared = {*map(id, of_whole.values())} & {*map(id, of_another.values())}
    result["blocks that another dict gets, too"] = len(shared)
    return result | {"bytes that stay": storage_bytes(kept), "alive without backward": is_alive}


def on_device(packs) -> list:
    """The tensors that autograd keeps, and the memory of blocks that have not left."""
    tensors = (p if hasattr(p, "detach") else p.block.on_device for p in packs)
    return [tensor for tensor in tensors if tensor is not None]


def alive(pack, case: Case) -> bool:
    """Whether a forward without a backward leaves its tensors behind when nobody has them."""
    x, _, w = (tensor.detach() for tensor in inputs(case))
    x, w = x[:2].clone().requires_grad_(), w[:, :2]  # so few bytes that all stay
    with saved_tensors_hooks(pack, lambda packed: packed):
        scores = (x @ w).softmax(-1)
    reference = weakref.ref(scores)
    del scores
    return reference() is not None


def expected(case: Case) -> list[dict]:
    leaves = inputs(case)
    loss = layer(*leaves)
    loss.backward()
    right = {"loss": loss.detach(), "gradients": [leaf.grad for leaf in leaves]}
    right |= {
        "a part of a weight stays, in its memory": True,
        "exactly LEAST_OFFLOAD bytes leave": True,
    }
    right |= {"blocks of what stays": 0, "what stays is detached": True}
    right |= {"blocks of one storage, of which three views are saved": 1}
    return [right | {"blocks that another dict gets, too": 0}]


def memory(case: Case, rank: int, record) -> str | None:
    values, R, W = record.values, case.rows, case.width
    # x, both parts, their product, mixed, scores, and these as float, sin, and double again.
    right = 8 * R * W + 16 * R * W + 8 * R * W + 8 * W * W + (8 + 4 + 4 + 8) * R * W
    moved, what = values["bytes that leave"], f"{values['storages that leave']} storages"
    if moved != right:
        return f"{what} of {moved} bytes leave; it should be 8 of {right} bytes"
    right = 8 * W * 2 * W + 8 * W * R + 8 * R  # the weights, and the result of exp
    if (stay := values["bytes that stay"]) != right:
        about = "when the blocks have left, autograd still keeps"
        return f"{about} {stay} bytes on the device; it should be {right}"
    if values["alive without backward"]:
        return "the result of a forward that has no backward is alive for ever"


def picture(runs):
    values = runs[0][1][0].values
    names = "bytes of these tensors", "bytes that leave", "bytes that stay"
    about = f"{values['saved tensors that leave']} saved tensors that leave, in"
    about += f" {values['storages that leave']} storages; weights and small tensors stay"
    return [about, bars({name: values[name] for name in names})]


VERSIONS = """
each_tensor_by_itself: Each saved tensor gets a block: what is saved twice leaves twice.
    address, => len(blocks),
by_address_of_view: Blocks are found by where a tensor begins, not its storage: parts of one storage
    leave with the whole storage each.
    address, => tensor.data_ptr(),
contiguous_first: The tensor is made contiguous first: a view with other strides is copied, and its
    storage leaves twice.
- storage = tensor.untyped_storage()
+ tensor = tensor.detach().contiguous()
+ storage = tensor.untyped_storage()
blocks_of_all_layers: Blocks are looked up among those of all layers: another layer's tensor can
    have had the same address.
    tensor: Tensor) => tensor: Tensor, all_blocks={})
    blocks.setdefault(address, => blocks[address] = all_blocks.setdefault(address,
by_dtype: Blocks are found by dtype, too: a storage that is saved in two of them leaves twice.
    address, => (address, tensor.dtype),
by_addresses_of_views: All is found by where a tensor begins, not its storage: a part of a weight
    leaves, and parts of one storage leave with the whole storage each.
    address = storage.data_ptr() => address = tensor.data_ptr()
part_leaves: A part of a weight leaves: `stays` has addresses of storages, not of tensors.
    address in stays => tensor.data_ptr() in stays
what_stays_is_copied: What stays is copied: that takes memory, and frees none.
    tensor.detach() => tensor.detach().clone()
blocks_for_all: What stays also gets a block, and what is in blocks leaves.
    address = storage.data_ptr() => blocks.setdefault(address := storage.data_ptr(), Block(tensor))
block_of_a_copy: The block has a copy of the tensor: it must have the memory of its whole storage.
    Block(tensor) => Block(tensor.detach().clone())
numbers_counted: Numbers are counted, not bytes: large storages stay.
    storage.nbytes() => storage.nbytes() // tensor.element_size()
weights_leave: Weights leave, too: they are needed all the time, and that frees nothing.
    LEAST_OFFLOAD or address in stays => LEAST_OFFLOAD
small_ones_leave: Small tensors leave, too: to start a copy of them takes longer than to make it.
    storage.nbytes() < LEAST_OFFLOAD or address => address
one_byte_more: A storage of exactly LEAST_OFFLOAD bytes stays: only those with fewer do.
    nbytes() < => nbytes() <=
size_of_view: A small view stays, and keeps a large storage in memory: count the storage.
    storage.nbytes() < => tensor.nbytes <
not_detached: A tensor that stays refers to its node, and the node to it: both live for ever.
    return tensor.detach() => return tensor
never_leaves: The block is not put into blocks: only what is there leaves.
    setdefault => get
offset_forgotten: The tensor comes back from the beginning of its storage: a part has an offset.
    tensor.storage_offset() => 0
stride_forgotten: The tensor comes back as if it were contiguous: a transposed one, or a part of
    wider rows, has other strides.
    tensor.stride => torch.empty(tensor.shape).stride
also_right:
def _pack(blocks, stays, tensor):
    where = tensor.untyped_storage().data_ptr()
    if where in stays or len(tensor.untyped_storage()) < LEAST_OFFLOAD:
        return tensor.data
    if where not in blocks:
        blocks[where] = Block(tensor.detach())
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return Saved(block=blocks[where], dtype=tensor.dtype, place=place)
"""
