"""PyTorch owns the tensors, JAX computes on them: one exchange (`to_jax`, `to_torch`), in-place calls and state pools.

`import interop` leaves the GPU's memory to be shared: it sets `XLA_PYTHON_CLIENT_PREALLOCATE=false` unless JAX has
started already or the variable is set.

Example:
    >>> import torch
    >>> to_torch(to_jax(torch.ones(2)) + 1)
    tensor([2., 2.])
"""

import os

from jax._src import xla_bridge  # no public name says whether the backends have started, and asking must not start them

if not xla_bridge.backends_are_initialized():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from interop.cache import GDNCache
from interop.dlpack import to_jax, to_torch
from interop.huggingface import replace_gated_delta_net, restore
from interop.inplace import InPlace
from interop.lightllm import LinearAttBackend

__all__ = ["GDNCache", "InPlace", "LinearAttBackend", "replace_gated_delta_net", "restore", "to_jax", "to_torch"]
