"""Ready ids: a file of token ids that another tool has made, mapped into memory and checked.

It is numpy's .npy with one axis of uint16 or uint32; or .bin as nanoGPT's, without a header: of
uint16, or uint32 if the vocabulary needs it. A .bin does not say what it holds, so it is examined.
"""

import json
import shlex
import zlib

import numpy as np

from picotron_min.runtime.wording import explained

PART = 2**24  # ids that are looked at together: a file may be larger than memory
LLM_C = (20240520, 20240801)  # versions of its files, with which their header begins


def open_ids(name: str, vocab_size: int, end_of_text: int) -> tuple[np.ndarray, np.ndarray, str]:
    """The ids, where each document ends (the last may be cut off), and a checksum.

    ValueError, with the command that converts them, for ids in another form.
    """
    dtype, is_numpy = "uint16" if vocab_size <= 2**16 else "uint32", name.endswith(".npy")
    with explained(f"dataset.name={name} cannot be read"):
        _check_start(name, is_numpy)
        tokens = np.load(name, mmap_mode="r") if is_numpy else np.memmap(name, dtype, mode="r")
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(
                f"it has {tokens.ndim} axes of {tokens.dtype}, not one of uint16 or uint32: "
                f"{_conversion(name, None, dtype)}"
            )
        largest, checksum, ends, used = 0, 0, [len(tokens)], np.zeros(4, bool)
        for start in range(0, len(tokens), PART):
            part = tokens[start : start + PART]
            largest, checksum = max(largest, part.max()), zlib.crc32(part, checksum)
            ends = np.append(ends, start + 1 + np.flatnonzero(part == end_of_text))
            used |= part[: len(part) // 4 * 4].reshape(-1, 4).any(0)  # of places 0 to 3, 4 to 7 ...
        if largest == 0:
            raise ValueError("it has no id but 0: copy it again, or make it anew")
        if len(tokens) > 32 and not used[1::2].any():  # halves or quarters of wider ids
            size, zeros = (2, "half") if used[2] else (4, "three of four")
            size *= tokens.itemsize
            raise ValueError(
                f"{zeros} of its numbers are 0, as in ids of {size} bytes: "
                f"{_conversion(name, f'<i{size}', dtype)}"
            )
    if largest >= vocab_size:
        raise ValueError(
            f"dataset.name={name}, read as {tokens.dtype}, has the token id {largest}, "
            f"and the model {vocab_size} ids: "
            "set model.vocab_size, or dataset.tokenizer to its maker's, or convert the ids"
        )
    return tokens, np.unique(ends), f"{checksum:08x}"


def _check_start(name: str, is_numpy: bool) -> None:
    with open(name, "rb") as file:
        start = file.read(8)
    if start.startswith(b"\x93NUMPY") != is_numpy:
        begins, other = ("does not begin", ".bin") if is_numpy else ("begins", ".npy")
        raise ValueError(f"it {begins} as numpy's files: if it holds ids, rename it to {other}")
    if int.from_bytes(start[:4], "little") in LLM_C:
        cut = f"tail -c +1025 {shlex.quote(name)} > ids.bin"
        raise ValueError(f"it begins with 1,024 bytes that llm.c puts before ids: run  {cut}")


def _conversion(name: str, found: str | None, dtype: str) -> str:
    """The command that writes ids in the form that is read; `found`: what a .bin holds."""
    file, is_numpy = json.dumps(name), name.endswith(".npy")
    read = f"numpy.load({file}).ravel()" if is_numpy else f'numpy.fromfile({file}, "{found}")'
    write = 'numpy.save("ids.npy", ids)' if is_numpy else 'ids.tofile("ids.bin")'
    check = f'assert (wide == ids).all(), "some ids are no {dtype}"'  # those below 0, for example
    code = f'import numpy; wide = {read}; ids = wide.astype("{dtype}"); {check}; {write}'
    return f"run  python -c {shlex.quote(code)}"
