"""Every operator in plain jax.numpy, for any device.

Pools come stacked, `[L, num_slots, …]`, and a `varlen.Batch` says what to read and write; nothing here checks arguments.
"""

from gdn_jax.xla import chunk, conv, gating, mtp, norm, recurrent

__all__ = ["chunk", "conv", "gating", "mtp", "norm", "recurrent"]
