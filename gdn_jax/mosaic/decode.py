"""The layer on one token a sequence, or on a verify step, in one launch: conv update, gating, rule, gated norm.

    y <- act(bias + sum of w_i window_i);   g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    M <- e^g M;   u = beta (v - M^T k');   M <- M + k' u^T;   o = M^T q';   o <- norm(o) w silu(z)

Beside the states, whose bytes count, a sequence moves its conv rows, 2 D (W - 1 + S) elements, about 5 % of them in bfloat16.
A CTA takes one value head. Each of its warpgroups takes 64 columns of the state by the code of the rule kernels, and its share
of the channels of q, k and v for the conv, whose outputs all of them read from shared memory.

The conv rows of a key head are read by all its value heads and shifted in place. These CTAs form a cluster: each arrives at a
barrier when it has used the rows, and the first writes them when all have.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    channels_layout,
    decay_of,
    direct_layout,
    f32,
    i32,
    keep,
    launch,
    load,
    row_layout,
    rule_step,
    sigmoid,
    swizzled,
    swizzled_layout,
)
from gdn_jax.types import GDNConfig, GDNWeights
from gdn_jax.varlen import inside

COLUMNS = 64  # of a state, a warpgroup
FEW = 64  # value heads of a batch, up to which states come straight from global memory: the shortest way
MAX_SHARED_BYTES = 160 * 1024  # of states in a CTA


def decode(
    mixed: Array,
    weights: GDNWeights,
    norm_weight: Array | None,
    norm_eps: Array,
    conv: Array,
    ssm: Array,
    slots: Array,
    has_initial_state: Array | None,
    num_accepted_tokens: Array | None,
    query_start_loc: Array | None,
    layer: Array,
    *,
    config: GDNConfig,
) -> tuple[Array, Array, Array]:
    """`mixed` `[T, qkvz_dim + ba_dim]`, `conv` `[L, num_slots, D, W - 1 + S]`, `ssm` `[L, num_slots (S + 1), HV, K, V]`, `slots`
    `[N]`, `layer` int32 of any value. With `query_start_loc` `[N + 1]` and `num_accepted_tokens` `[N]` a verify step, else T = N
    tokens of one sequence each, with `has_initial_state` bool `[N]`. T, N, L and num_slots are at least 1.

    Returns `o` `[T, HV, V]` in `mixed.dtype` and the updated pools.
    """
    num_tokens, n, dtype = mixed.shape[0], slots.shape[0], mixed.dtype
    num_layers, num_slots, _, columns = conv.shape
    h_count, hv_count, k_dim, v_dim = config.tp_num_k_heads, config.tp_num_v_heads, config.head_k_dim, config.head_v_dim
    width, longest, per_k_head = config.conv_kernel_dim, config.mtp_step + 1, hv_count // h_count
    warpgroups, verify = v_dim // COLUMNS, query_start_loc is not None
    staged = longest > 1 or n * hv_count > FEW
    layout = (swizzled_layout if staged else direct_layout)(COLUMNS, ssm.dtype)
    of_k, of_v, of_row = layout.reduce(1), layout.reduce(0), row_layout()
    buffers = 2 if longest > 1 and 2 * k_dim * v_dim * ssm.dtype.itemsize <= MAX_SHARED_BYTES else 1

    inputs = dict(
        x=mixed, weight=weights.conv_weight, bias=weights.conv_bias, A_log=weights.A_log, dt_bias=weights.dt_bias,
        norm_weight=norm_weight, norm_eps=norm_eps[None], slots=slots, layer=layer[None], accepted=num_accepted_tokens,
        loc=query_start_loc, has=None if has_initial_state is None else has_initial_state.astype(i32),
    )  # fmt: skip
    given = {name: x for name, x in inputs.items() if x is not None}

    def body(*refs: Any) -> None:
        ref = dict(zip(given, refs))
        conv_ref, ssm_ref, o_ref, tiles_sm, qk_sm, v_sm, o_sm, arrived, convolved, out_ready, *rows_used = refs[len(given) :]
        i, h, member, wg = (lax.axis_index(name) for name in ("n", "h", "member", "wg"))
        hv, mine = h * per_k_head + member, pl.ds(wg * COLUMNS, COLUMNS)
        slot, at = ref["slots"][i], ref["layer"][0]
        start, end, offset = i, i + 1, 0
        valid = inside(slot, num_slots) & inside(at, num_layers)
        if verify:
            start = jnp.clip(ref["loc"][i], 0, num_tokens)
            end = jnp.clip(ref["loc"][i + 1], start, num_tokens)
            offset = ref["accepted"][i] - 1
            valid &= inside(offset, longest) & (end - start <= longest)
        length, row = end - start, at * num_slots + slot

        @pl.when(valid & (length > 0))
        def _() -> None:
            first_state = ssm_ref.at[row * longest + offset, hv, :, mine]
            tile, m = tiles_sm.at[wg], None
            if staged:
                plgpu.copy_gmem_to_smem(first_state, tile.at[0], arrived.at[wg])
            else:
                m = load(first_state, layout)
            tokens = [jnp.minimum(start + t, num_tokens - 1) for t in range(longest)]
            has = ref["has"][i] != 0 if "has" in ref else None
            rate, shift = (ref[name][hv].astype(f32) for name in ("A_log", "dt_bias"))
            b_at = config.qkvz_dim + hv
            writes = [ref["x"][token, b_at].astype(f32) for token in tokens]
            decays = [ref["x"][token, b_at + hv_count].astype(f32) for token in tokens]

            def convolve(first: Any, size: int, out: Any, out_first: Any) -> list[Array]:
                """Conv outputs of some channels to `out`; returns their windows: history, then the new inputs."""
                lanes, here = channels_layout(size), pl.ds(first, size)
                taps = [load(ref["weight"].at[here, j], lanes) for j in range(width)]
                bias = load(ref["bias"].at[here], lanes) if "bias" in ref else None
                window = [load(conv_ref.at[row, here, offset + j], lanes) for j in range(width - 1)]
                window += [load(ref["x"].at[token, here], lanes) for token in tokens]
                if has is not None:
                    window[: width - 1] = [keep(has, x, lanes) for x in window[: width - 1]]
                for t in range(longest):
                    y = taps[0] * window[t]
                    for j in range(1, width):
                        y += taps[j] * window[t + j]
                    y = y if bias is None else y + bias
                    y = y if config.activation is None else y * sigmoid(y)
                    out[t, pl.ds(out_first, size)] = y.astype(dtype)
                return window

            def shift_rows(first: Any, size: int, window: list[Array]) -> None:
                """The new conv rows: the window of the first new token and on, zeros behind the last."""
                for j in range(columns):
                    value, t = window[j + 1], j - (width - 2)  # of which token
                    value = value if t < 1 else keep(length > t, value, channels_layout(size))
                    conv_ref[row, pl.ds(first, size), j] = value.astype(conv.dtype)

            size = min(k_dim, 2 * k_dim // warpgroups)  # of this warpgroup's share of q and k
            shared_rows = []
            for begin in range(0, 2 * k_dim, size * warpgroups):
                begin = begin + wg * size  # in q | k of the key head
                of_q_or_k = lax.div(begin, i32(k_dim))
                first = (of_q_or_k * h_count + h) * k_dim + begin - of_q_or_k * k_dim
                shared_rows.append((first, size, convolve(first, size, qk_sm, begin)))
            first = 2 * config.key_dim + hv * v_dim + wg * COLUMNS
            window = convolve(first, COLUMNS, v_sm, wg * COLUMNS)
            for barrier in rows_used:
                plgpu.barrier_arrive(barrier)
            shift_rows(first, COLUMNS, window)
            decays = [decay_of(rate, a, shift) for a in decays]
            writes = [sigmoid(b) for b in writes]

            plgpu.barrier_arrive(convolved)
            plgpu.barrier_wait(convolved)
            if staged:
                plgpu.barrier_wait(arrived.at[wg])
                m = plgpu.load(tile.at[0], layout=layout).astype(f32)
            if has is not None:
                m = keep(has, m, layout)
            for t in range(longest):
                query, key = (load(qk_sm.at[t, pl.ds(at, k_dim)], of_k) for at in (0, k_dim))
                value = load(v_sm.at[t, mine], of_v)
                m, o = rule_step(m, query, key, value, decays[t], writes[t], f32(k_dim**-0.5), True, layout)
                o_sm[t, mine] = o.astype(dtype)
                target = ssm_ref.at[row * longest + t, hv, :, mine]

                @pl.when(length > t)  # no token beyond the sequence is followed by a real one
                def _() -> None:
                    if not staged:
                        target[...] = m.astype(ssm.dtype)
                        return
                    if t > 0:
                        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                    tile[t % buffers] = m.astype(ssm.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(tile.at[t % buffers], target)

            plgpu.barrier_arrive(out_ready)
            plgpu.barrier_wait(out_ready)
            for t in range(longest):

                @pl.when((length > t) & (wg == t % warpgroups))
                def _() -> None:
                    o = load(o_sm.at[t], of_row)
                    if norm_weight is not None:
                        z = load(ref["x"].at[tokens[t], pl.ds(config.conv_dim + hv * v_dim, v_dim)], of_row)
                        w = load(ref["norm_weight"], of_row)
                        o *= lax.rsqrt(jnp.sum(o * o) * (1 / v_dim) + ref["norm_eps"][0])
                        o = (o.astype(dtype).astype(f32) * w).astype(jnp.promote_types(dtype, norm_weight.dtype)).astype(f32)
                        o *= z * sigmoid(z)
                    o_ref[tokens[t], hv] = o.astype(dtype)

            for barrier in rows_used:
                plgpu.barrier_wait(barrier)  # also by those who write nothing: others arrive in their shared memory

            @pl.when(member == 0)
            def _() -> None:
                for rows in shared_rows:
                    shift_rows(*rows)

            if staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Zeros for the tokens of padding, and behind the last sequence.
        def zero(token: Array, _: None) -> None:
            o_ref[token, hv] = plgpu.layout_cast(jnp.zeros((v_dim,), dtype), of_row)

        @pl.when(wg == 0)
        def _() -> None:
            lax.fori_loop(jnp.where(valid, end, start), end, zero, None)
            if verify:
                lax.fori_loop(end, jnp.where(i == n - 1, num_tokens, end), zero, None)

    clustered = per_k_head > 1
    o, conv, ssm = launch(
        body,
        "gdn_decode",
        dict(n=n, h=h_count),
        tuple(given.values()),
        (conv, ssm),
        jax.ShapeDtypeStruct((num_tokens, hv_count, v_dim), dtype),
        (
            plgpu.SMEM((warpgroups, buffers, k_dim, COLUMNS), ssm.dtype, transforms=swizzled(ssm.dtype)),
            plgpu.SMEM((longest, 2 * k_dim), dtype),
            *(plgpu.SMEM((longest, v_dim), dtype) for _ in range(2)),
            plgpu.Barrier(num_barriers=warpgroups),
            *(plgpu.Barrier(num_arrivals=warpgroups) for _ in range(2)),
            *([plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=warpgroups)] if clustered else []),
        ),
        cluster=dict(member=per_k_head),
        warpgroups=warpgroups,
    )
    return o, conv, ssm
