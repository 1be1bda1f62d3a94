"""What the tests of Mosaic kernels share.

Without a GPU they run in Pallas' GPU interpreter, which looks for races, and are lowered for an H200 that is not there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import ml_dtypes
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

BF16, F32, F16 = ml_dtypes.bfloat16, np.float32, np.float16
DTYPES = {"bf16": (BF16, BF16), "bf16-f32": (BF16, F32), "f32": (F32, F32), "f16": (F16, F16)}  # of tokens, of states
TOL = {BF16: 3e-3, F32: 2e-6, F16: 3e-3 / 4}  # of outputs
POOL_TOL = {BF16: 3e-3, F32: 1e-5, F16: 4e-4}
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@contextmanager
def h200() -> Iterator[None]:
    """What is traced inside takes the chip for an H200."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        yield


def interpret(f: Callable[..., Any], *args: Any, races: bool | None = False) -> Any:
    """`f(*args)` in the interpreter; with or without races between threads, as the caller expects (None: either)."""
    with h200(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(jax.jit(f)(*args))
    assert races is None or gpu_callbacks.get_races().races_found is races
    return out


def lowered(f: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The program for CUDA: lays out every array of every kernel, and finds what the chip could not do."""
    with h200():
        return jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
