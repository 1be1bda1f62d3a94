"""What every test run needs before jax and torch start: threads, devices, hypothesis, and the `gpu` marker."""

import functools
import os
from collections.abc import Iterator

import pytest

# jax and torch share the card with each other and with other processes: neither takes it all at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# XLA's pool of threads on a CPU: Pallas' GPU interpreter takes one for every warpgroup of a cluster, which wait for each other.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: one thread each for torch's loops and for BLAS (XLA: one per CPU device at least).
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import jax

try:
    import hypothesis
except ImportError:  # the GPU machines may not have it; the property tests then say so by themselves
    pass
else:
    # No deadline: the first example compiles. In CI the examples are the same in every run.
    hypothesis.settings.register_profile(
        "gdn_jax", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI"))
    )
    hypothesis.settings.load_profile("gdn_jax")

# Two devices on the CPU, so that shard_map is tested with real shards; everything else runs on the first.
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Without LLVM's optimisations: half the time of files that look at structure and compile a program a test.

    XLA's own passes stay as they are, and so do fusions, layouts and aliases.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def why_no_gpu() -> str | None:
    """The reason why tests marked `gpu` cannot run here; None where they can."""
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"jax has no CUDA device here: {str(error).splitlines()[0]}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
