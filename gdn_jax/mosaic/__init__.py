"""The operators as Pallas Mosaic GPU kernels, for Hopper and newer. Imported only where one of them is chosen."""

from gdn_jax.mosaic import chunk, common, conv, decode, gating, mtp, norm, prefill, prologue, recurrent

__all__ = ["chunk", "common", "conv", "decode", "gating", "mtp", "norm", "prefill", "prologue", "recurrent"]
