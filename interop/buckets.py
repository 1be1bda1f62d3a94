"""Padding to a few sizes, so that ragged batches share a handful of compiled programs."""

import torch.nn.functional as F
from torch import Tensor


def bucket(count: int, least: int = 1) -> int:
    """The power of two from `count` on, at least `least`.

    >>> bucket(5), bucket(8), bucket(3, least=16)
    (8, 8, 16)
    """
    return max(least, 1 << max(count - 1, 0).bit_length())


def padded(x: Tensor, size: int, value: int = 0) -> Tensor:
    """`x` with rows of `value` behind it, `size` rows in all."""
    return x if len(x) == size else F.pad(x, (*[0] * (2 * x.ndim - 1), size - len(x)), value=value)
