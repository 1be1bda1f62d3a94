"""gdn_gating: two elementwise functions of a token and a head.

    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

An element moves the bytes of a and b and 8 of results: 12 in bfloat16, so that a decode step is over when it has been launched.
A CTA takes all heads of some tokens; a thread holds one head of one or more of them.

| elements a CTA | when | why |
|---|---|---|
| 512 | 2^17 elements or more | they fill the card: four loads of a thread under way |
| 128 | else | a thread has one: more CTAs, the shortest way |

Sizes that are no powers of two are cut into pieces that are, so that nothing reaches beyond an array: the heads in a CTA, the
tokens that are left at the end in CTAs of their own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from gdn_jax.mosaic.common import (
    block_layout,
    by_blocks,
    f32,
    launch,
    load,
    num_blocks,
    powers_of_two,
    sigmoid,
    softplus,
)

MANY = 2**17  # elements of a batch
WIDEST = 128  # heads of a piece


def rows_of_block(num_tokens: int, num_v_heads: int) -> int:
    """How many tokens one CTA takes: a power of two."""
    elements = 512 if num_tokens * num_v_heads >= MANY else 128
    most = min(max(elements // num_v_heads, 1), num_tokens)
    return 1 << most.bit_length() - 1


def gating(A_log: Array, a: Array, b: Array, dt_bias: Array, *, exp_times: Callable[..., Array]) -> tuple[Array, Array]:
    """`A_log`, `dt_bias` `[HV]`; `a`, `b` `[..., HV]`, not empty; `exp_times(A_log, a, dt_bias, softplus=)` is the arithmetic of
    the XLA form, right also where a factor overflows. Returns float32 `g`, `beta` `[..., HV]`.
    """
    num_v_heads = A_log.shape[0]
    a, b, shape = a.reshape(-1, num_v_heads), b.reshape(-1, num_v_heads), a.shape
    num_tokens = a.shape[0]
    rows = rows_of_block(num_tokens, num_v_heads)

    def body(A_log_ref: Any, a_ref: Any, b_ref: Any, dt_bias_ref: Any, g_ref: Any, beta_ref: Any) -> None:
        def loads(tokens: Any, head: int, heads: int) -> tuple[Any, ...]:
            """Which elements, their `A_log`, a, `dt_bias`, and their b."""
            here, layout = pl.ds(head, heads), block_layout(tokens.size, heads)

            def of_heads(ref: Any) -> Array:
                vector = load(ref.at[here], layout.reduce(0))
                return plgpu.layout_cast(lax.broadcast_in_dim(vector, (tokens.size, heads), (1,)), layout)

            of_both = [load(ref.at[tokens, here], layout) for ref in (a_ref, b_ref)]
            return (tokens, here), (of_heads(A_log_ref), of_both[0], of_heads(dt_bias_ref)), of_both[1]

        def block(first: Any, size: int) -> None:
            for at, rate_and_x, y in [
                loads(pl.ds(first, size), *piece) for piece in powers_of_two(num_v_heads, WIDEST)
            ]:
                g_ref[at] = -exp_times(*rate_and_x, softplus=softplus)
                beta_ref[at] = sigmoid(y)

        by_blocks(num_tokens, rows, block)

    out = jax.ShapeDtypeStruct(a.shape, f32)
    g, beta = launch(
        body,
        "gdn_gating",
        dict(block=num_blocks(num_tokens, rows)),
        (A_log, a, b, dt_bias),
        (),
        (out, out),
        approx_math=False,
    )
    return g.reshape(shape), beta.reshape(shape)
