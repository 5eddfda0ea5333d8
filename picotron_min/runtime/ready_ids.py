"""Ready ids: a file of token ids that another tool has made, mapped into memory and checked.

It is numpy's .npy with one axis of uint16 or uint32; or .bin as nanoGPT's, without a header: of
uint16, or uint32 if the vocabulary needs it. A .bin does not say what it holds: its bytes must.
"""

import json
import shlex
import zlib

import numpy as np

PART = 2**24  # ids that are looked at together: a file may be larger than memory
# Tools that write a header before the ids: its bytes, and how it begins.
HEADERS = [("llm.c", 1024, np.int32(version).tobytes()) for version in (20240520, 20240801)]
HEADERS += [("litgpt", 24, b"LITPKDS")]


def open_ids(name: str, vocab_size: int, end_of_text: int) -> tuple[np.ndarray, np.ndarray, str]:
    """The ids, where each document ends (the last may be cut off), and a checksum.

    ValueError, with the command that converts them, for ids in another form.
    """
    dtype, is_numpy = "uint16" if vocab_size <= 2**16 else "uint32", name.endswith(".npy")
    try:
        _check_start(name, is_numpy)
        tokens = np.load(name, mmap_mode="r") if is_numpy else np.memmap(name, dtype, mode="r")
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            found = f"it has {tokens.ndim} axes of {tokens.dtype}, not one of uint16 or uint32"
            raise ValueError(f"{found}: {_conversion(name, None, dtype)}")
        largest, checksum = 0, 0
        ends, bits = [len(tokens)], np.zeros(4, tokens.dtype)
        for start in range(0, len(tokens), PART):
            part = tokens[start : start + PART]
            largest, checksum = max(largest, part.max()), zlib.crc32(part, checksum)
            ends = np.append(ends, start + 1 + np.flatnonzero(part == end_of_text))
            # The bits that are set in any of places 0, 4, 8 ..., in any of 1, 5, 9 ..., and so on.
            bits |= np.bitwise_or.reduce(part[: len(part) // 4 * 4].reshape(-1, 4), axis=0)
        _check_width(name, bits, dtype)
    except (ValueError, EOFError) as error:
        raise ValueError(f"dataset.name={name} cannot be read: {error}") from None
    if largest >= vocab_size:
        problem = f"dataset.name={name} has the token id {largest}, and the model {vocab_size} ids"
        raise ValueError(f"{problem}: set model.vocab_size, or dataset.tokenizer to its maker's")
    return tokens, np.unique(ends), f"{checksum:08x}"


def _check_start(name: str, is_numpy: bool) -> None:
    with open(name, "rb") as file:
        start = file.read(8)
    if start.startswith(b"\x93NUMPY") != is_numpy:
        if is_numpy:
            raise ValueError(
                "it does not begin as numpy's files: if it holds ids, rename it to .bin"
            )
        raise ValueError("it begins as numpy's files: rename it to .npy")
    for tool, size, mark in HEADERS:
        if start.startswith(mark):
            cut = f"tail -c +{size + 1} {shlex.quote(name)} > ids.bin"
            raise ValueError(
                f"it begins with {size:,} bytes that {tool} puts before ids: run  {cut}"
            )


def _check_width(name: str, bits: np.ndarray, dtype: str) -> None:
    """Whether the bytes are those of wider ids, or of ids in the other byte order."""
    size = bits.dtype.itemsize
    if bits.any() and not bits[1::2].any():  # small ids in more bytes: their upper ones are 0
        places, width = ("three of four places", 4) if not bits[2] else ("every second place", 2)
        problem = f"it has 0 in {places}, as ids of {size * width} bytes that are read as {size}"
        raise ValueError(f"{problem}: {_conversion(name, f'uint{8 * size * width}', dtype)}")
    if bits.any() and not (bits & 0xFF).any():
        problem = "the lowest byte of each id is 0, as in the other byte order"
        raise ValueError(f"{problem}: {_conversion(name, f'>u{size}', dtype)}")


def _conversion(name: str, found: str | None, dtype: str) -> str:
    """The command that writes ids in the form that is read; `found`: what a .bin holds."""
    file = json.dumps(name)
    if name.endswith(".npy"):
        code = f'numpy.save("ids.npy", numpy.load({file}).ravel().astype("{dtype}"))'
    else:
        code = f'numpy.fromfile({file}, "{found}").astype("{dtype}").tofile("ids.bin")'
    return f"run  python -c {shlex.quote(f'import numpy; {code}')}"
