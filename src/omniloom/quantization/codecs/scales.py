"""Scales: guarded division of maxima, groups along K, power-of-two (E8M0) scales by bit arithmetic."""

from __future__ import annotations

import torch

FLOAT32 = torch.finfo(torch.float32)


def groups_of(cells: int, size: int) -> int:
    """Return how many groups of ``size`` cover ``cells``."""
    return -(-cells // size)


def positive_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return float32 ``amax / largest``, usable as a divisor and as a factor.

    A group of zeros gets 1. A denormal quotient becomes the smallest normal number: it would have too few bits, and
    might be zero. Near the top of float32 it is held down so that ``largest · scale`` does not round to infinity.
    """
    top = FLOAT32.max / largest * (1 - FLOAT32.eps)
    return torch.where(amax > 0, (amax / largest).clamp(FLOAT32.tiny, top), 1.0)


def split_groups(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``matrix`` (N, K) in float32 as (N, ceil(K/size), size), the last group filled up with zeros."""
    matrix = matrix.float()
    missing = -matrix.shape[1] % size
    if missing:
        matrix = torch.nn.functional.pad(matrix, (0, missing))
    return matrix.unflatten(1, (-1, size))


def scale_groups(values: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``values`` (N, K) float32 multiplied by ``scale`` (N, ceil(K/size)), one factor per group."""
    if values.shape[1] % size == 0:
        return (values.unflatten(1, (-1, size)) * scale.unsqueeze(-1)).flatten(1)
    return values * scale.repeat_interleave(size, dim=1)[:, : values.shape[1]]


def shared_exponent(amax: torch.Tensor, largest_exponent: int, limit: float = 2.0) -> torch.Tensor:
    """Return the E8M0 byte of each group: uint8 in the shape of ``amax`` (float32, not negative).

    With amax = m·2^p, 1 ≤ m < 2, the exponent is ``p - largest_exponent``, and one more where ``m > limit``. So 2 gives
    floor(log2 amax) - largest_exponent, and ``limit·2**largest_exponent = Q`` gives ceil(log2(amax / Q)). It is taken
    from the bits, as log2 in float32 rounds to the wrong side of a power of two. Denormal groups and zeros get 2^-127.
    At the top the byte is held down so that no code decodes to infinity.
    """
    carry = round((2.0 - limit) * 2**23) - (limit < 2.0)
    power = (amax.contiguous().view(torch.int32) + carry) >> 23
    return (power - largest_exponent).clamp(0, 254 - largest_exponent).to(torch.uint8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 2^(e - 127) of E8M0 bytes; 255 is NaN."""
    byte = exponents.to(torch.int32)
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)
