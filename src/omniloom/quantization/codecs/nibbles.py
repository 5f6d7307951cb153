"""Two 4-bit codes in a byte: packing, unpacking and decoding by a table of byte pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_low_first(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 (N, ceil(K/2)) of codes uint8 (N, K): even k in the low nibble; an odd K ends with a zero nibble."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_low_first(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the codes, uint8 (N, columns), of ``pack_low_first``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :columns]


def constant(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as float32 on the device of ``like``."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def pair_table(values: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Return int64 (256,): for each byte the float32 bits of its two values, in the order in which they are stored."""
    high, low = values.repeat_interleave(16), values.repeat(16)
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=1).view(torch.int64).flatten()


def lookup_pairs(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return float32 (N, 2·columns) of packed bytes uint8 (N, columns): one table read for two values."""
    pairs = table.index_select(0, packed.reshape(-1).to(torch.int32))
    return pairs.view(packed.shape).view(torch.float32)
