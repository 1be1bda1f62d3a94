"""The layer on one token a sequence, or on a verify step, in one launch: conv update, gating, rule, gated norm.

    y <- act(bias + sum of w_i window_i);   g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    M <- e^g M;   u = beta (v - M^T k');   M <- M + k' u^T;   o = M^T q';   o <- norm(o) w silu(z)

Beside the states, whose bytes count, a sequence moves its conv rows, 2 D (W - 1 + S) elements, about 5 % of them in bfloat16.
A CTA takes one or more value heads of one key head: the conv of their channels of q, k and v, whose outputs go through shared
memory; their states, all fetched by TMA at the start, tile after tile by the code of the rule kernels; the norm.

The conv rows of a key head are read by all its value heads and shifted in place. Where these are in several CTAs, the CTAs form
a cluster: each arrives at a barrier when it has used the rows, and the first writes them when all have.

| choice | when | why |
|---|---|---|
| all value heads of a key head in a CTA | decode, 16-bit states, N HV >= 512 | more bytes in flight, q and k once, no cluster |
| a value head a CTA | else | more CTAs; in a verify step the registers of one head |
| tiles of 128 columns | 16-bit states, N HV >= 512 | more work between two waits |
| tiles of 64 columns | else | registers of one tile: 3 CTAs on an SM |
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
    f32,
    keep,
    launch,
    load,
    row_layout,
    rule_step,
    sigmoid,
    swizzled,
    swizzled_layout,
    tokens_of,
)
from gdn_jax.mosaic.conv import convolve, load_channels, new_column
from gdn_jax.mosaic.norm import gated
from gdn_jax.types import GDNConfig, GDNWeights
from gdn_jax.varlen import inside

MANY = 512  # value heads of a batch: some to every SM
MAX_STATES = 64 * 1024  # bytes of states in a CTA that takes several value heads


def heads_and_columns(n: int, config: GDNConfig, itemsize: int) -> tuple[int, int]:
    """How many value heads a CTA takes, and the columns of its tiles."""
    k_dim, v_dim, heads = config.head_k_dim, config.head_v_dim, config.v_heads_per_k_head
    many = n * config.tp_num_v_heads >= MANY and itemsize == 2
    together = many and heads * k_dim * v_dim * itemsize <= MAX_STATES and config.mtp_step == 0
    wide = many and v_dim >= 128 and k_dim <= 128
    return heads if together else 1, 128 if wide else 64


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
    heads, vb = heads_and_columns(n, config, ssm.dtype.itemsize)
    members, verify = per_k_head // heads, query_start_loc is not None
    layout = swizzled_layout(vb, ssm.dtype)
    of_k, of_v, of_row = layout.reduce(1), layout.reduce(0), row_layout()
    tiles = [(head, part * vb) for head in range(heads) for part in range(v_dim // vb)]  # of a CTA, and their columns
    buffers = len(tiles) + (longest > 1)  # the states to start from, and a spare one to store from in turn

    inputs = dict(
        x=mixed, weight=weights.conv_weight, bias=weights.conv_bias, A_log=weights.A_log, dt_bias=weights.dt_bias,
        norm_weight=norm_weight, norm_eps=norm_eps[None], slots=slots, layer=layer[None], accepted=num_accepted_tokens,
        loc=query_start_loc, has=has_initial_state,
    )  # fmt: skip
    given = {name: x for name, x in inputs.items() if x is not None}

    def body(*refs: Any) -> None:
        ref = dict(zip(given, refs))
        conv_ref, ssm_ref, o_ref, tiles_sm, qk_sm, v_sm, o_sm, rows_sm, *barriers = refs[len(given) :]
        arrived, convolved, out_ready, *rows_used = barriers
        i, h, member = (lax.axis_index(name) for name in ("n", "h", "member"))
        first_hv = h * per_k_head + member * heads
        slot, at = ref["slots"][i], ref["layer"][0]
        start, end, offset = i, i + 1, 0
        valid = inside(slot, num_slots) & inside(at, num_layers)
        if verify:
            start, end = tokens_of(ref["loc"], i, num_tokens)
            offset = ref["accepted"][i] - 1
            valid &= inside(offset, longest) & (end - start <= longest)
        length, row = end - start, at * num_slots + slot

        def state_at(token: Any, head: int, column: int) -> Any:
            return ssm_ref.at[row * longest + token, first_hv + head, :, pl.ds(column, vb)]

        @pl.when(valid & (length > 0))
        def _() -> None:
            for number, (head, column) in enumerate(tiles):
                plgpu.copy_gmem_to_smem(state_at(offset, head, column), tiles_sm.at[number], arrived.at[number])
            tokens = [jnp.minimum(start + t, num_tokens - 1) for t in range(longest)]
            has = ref["has"][i] if "has" in ref else None

            # Everything is loaded before anything is stored: no load passes a store.
            def channels(first: Any, size: int) -> tuple[Any, ...]:
                """`(first, size, bias, taps, window)` of some channels."""
                lanes, here = channels_layout(size), pl.ds(first, size)
                return first, size, *load_channels(ref, conv_ref, row, here, offset, tokens, has, width, lanes)

            def gates(hv: Array, token: Array) -> tuple[Array, Array]:
                b, a = (ref["x"][token, config.qkvz_dim + part + hv].astype(f32) for part in (0, hv_count))
                return decay_of(ref["A_log"][hv].astype(f32), a, ref["dt_bias"][hv].astype(f32)), sigmoid(b)

            def output_gate(hv: Array, token: Array) -> tuple[Array, Array]:
                z = ref["x"].at[token, pl.ds(config.conv_dim + hv * v_dim, v_dim)]
                return load(z, of_row), load(ref["norm_weight"], of_row)

            hvs = [first_hv + head for head in range(heads)]
            qk_pieces = [channels((which * h_count + h) * k_dim, k_dim) for which in (0, 1)]
            v_pieces = [channels(2 * config.key_dim + hv * v_dim, v_dim) for hv in hvs]
            decay_and_write = [[gates(hv, token) for token in tokens] for hv in hvs]
            # Of one token now; of several when the registers of the tiles are free.
            output_gates = (
                [[output_gate(hv, tokens[0]) for hv in hvs]] if norm_weight is not None and longest == 1 else []
            )

            def outputs(out: Any, place: int, piece: tuple[Any, ...]) -> None:
                _, size, bias, taps, window = piece
                for t in range(longest):
                    out[t, pl.ds(place, size)] = convolve(bias, taps, window, t, config.activation).astype(dtype)

            def new_state(j: int, piece: tuple[Any, ...]) -> Array:
                """Column j of the new conv row."""
                return new_column(piece[4], j, width, length, channels_layout(piece[1])).astype(conv.dtype)

            for which, piece in enumerate(qk_pieces):
                outputs(qk_sm, which * k_dim, piece)
            for head, piece in enumerate(v_pieces):
                outputs(v_sm, head * v_dim, piece)
            for which, piece in enumerate(qk_pieces if rows_used else []):  # which other CTAs may still read
                for j in range(columns):
                    rows_sm[j, pl.ds(which * k_dim, k_dim)] = new_state(j, piece)
            for piece in v_pieces if rows_used else qk_pieces + v_pieces:
                for j in range(columns):
                    conv_ref[row, pl.ds(*piece[:2]), j] = new_state(j, piece)
            plgpu.barrier_arrive(convolved)
            plgpu.barrier_wait(convolved)
            for barrier in rows_used:  # one thread arrives for all: they have to be past their loads
                plgpu.barrier_arrive(barrier)

            for number, (head, column) in enumerate(tiles):
                plgpu.barrier_wait(arrived.at[number])
                m = plgpu.load(tiles_sm.at[number], layout=layout).astype(f32)
                m = m if has is None else keep(has, m, layout)
                here = pl.ds(head * v_dim + column, vb)
                for t in range(longest):
                    query, key = (load(qk_sm.at[t, pl.ds(first, k_dim)], of_k) for first in (0, k_dim))
                    value, (decay, write) = load(v_sm.at[t, here], of_v), decay_and_write[head][t]
                    m, o = rule_step(m, query, key, value, decay, write, f32(k_dim**-0.5), True, layout)
                    o_sm[t, here] = o.astype(dtype)
                    buffer = tiles_sm.at[number if t % 2 == 0 else len(tiles)]

                    @pl.when(length > t)  # no token beyond the sequence is followed by a real one
                    def _() -> None:
                        if t > 0:
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        buffer[...] = m.astype(ssm.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(buffer, state_at(t, head, column))

            if norm_weight is not None and longest > 1:
                output_gates = [[output_gate(hv, token) for hv in hvs] for token in tokens]
            plgpu.barrier_arrive(out_ready)
            plgpu.barrier_wait(out_ready)
            for t in range(longest):

                @pl.when(length > t)
                def _() -> None:
                    for head, hv in enumerate(hvs):
                        o = load(o_sm.at[t, pl.ds(head * v_dim, v_dim)], of_row)
                        if norm_weight is not None:
                            z, w = output_gates[t][head]
                            o *= lax.rsqrt(jnp.sum(o * o) * (1 / v_dim) + ref["norm_eps"][0])
                            o = gated(o, w, z, dtype, norm_weight.dtype)
                        o_ref[tokens[t], hv] = o.astype(dtype)

            for barrier in rows_used:
                plgpu.barrier_wait(barrier)  # also by those who write nothing: others arrive in their shared memory

                @pl.when(member == 0)
                def _() -> None:
                    lanes = channels_layout(k_dim)
                    for which, piece in enumerate(qk_pieces):
                        for j in range(columns):
                            new = plgpu.load(rows_sm.at[j, pl.ds(which * k_dim, k_dim)], layout=lanes, optimized=False)
                            conv_ref[row, pl.ds(piece[0], k_dim), j] = new

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Zeros for the tokens of padding, and behind the last sequence.
        def zero(token: Array, _: None) -> None:
            for head in range(heads):
                o_ref[token, first_hv + head] = plgpu.layout_cast(jnp.zeros((v_dim,), dtype), of_row)

        lax.fori_loop(jnp.where(valid, end, start), end, zero, None)
        if verify:
            lax.fori_loop(end, jnp.where(i == n - 1, num_tokens, end), zero, None)

    o, conv, ssm = launch(
        body,
        "gdn_decode",
        dict(n=n, h=h_count),
        tuple(given.values()),
        (conv, ssm),
        jax.ShapeDtypeStruct((num_tokens, hv_count, v_dim), dtype),
        (
            plgpu.SMEM((buffers, k_dim, vb), ssm.dtype, transforms=swizzled(ssm.dtype)),
            plgpu.SMEM((longest, 2 * k_dim), dtype),
            *(plgpu.SMEM((longest, heads * v_dim), dtype) for _ in range(2)),
            plgpu.SMEM((columns, 2 * k_dim), conv.dtype),
            plgpu.Barrier(num_barriers=len(tiles)),
            *(plgpu.Barrier() for _ in range(2)),
            *([plgpu.ClusterBarrier(collective_axes=("member",))] if members > 1 else []),
        ),
        cluster=dict(member=members),
    )
    return o, conv, ssm
