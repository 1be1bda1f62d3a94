"""`GDNCache`: the state pools of a whole model, in memory that torch owns and that never moves."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gdn_jax import GDNConfig, GDNState
from interop import dlpack

Slots = Tensor | np.ndarray | Sequence[int]
"""Request slots: integers of any width, `[M]`. One outside the pool is skipped."""

_INTEGERS = {dtype for pair in dlpack.DTYPES.items() if pair[1].kind in "iu" for dtype in pair}  # torch's and numpy's


class GDNCache:
    """The conv and ssm states of all layers and request slots, zeroed, as one pair of torch tensors.

    Attributes:
        config: the sizes, and the pools' dtypes.
        num_layers: `L`.
        num_slots: requests that the pools hold.
        state: `GDNState(conv, ssm)` of torch tensors: conv `[L, num_slots, D, W - 1 + S]`, ssm
            `[L, num_slots * (S + 1), HV, K, V]`. Pass it to `InPlace` as `caches` and `layer=i` beside it.

    Args:
        config: `GDNConfig`; of one tensor-parallel rank the pools hold `config.tp_size`'s part.
        num_layers: layers with such a state, at least 1.
        num_slots: at least 1.
        device: of the tensors, as torch writes it.

    Raises:
        TypeError: another type; ValueError: a number below 1, no device.

    Example:
        >>> config = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=8, head_v_dim=8, conv_kernel_dim=4, mtp_step=1)
        >>> cache = GDNCache(config, num_layers=3, num_slots=5, device="cpu")
        >>> tuple(cache.state.conv.shape), tuple(cache.layer(0).ssm.shape)
        ((3, 5, 64, 4), (10, 4, 8, 8))
    """

    def __init__(self, config: GDNConfig, num_layers: int, num_slots: int, *, device: torch.device | str) -> None:
        if not isinstance(config, GDNConfig):
            raise TypeError(f"GDNCache: `config` is of type {type(config).__name__}, expected a GDNConfig.")
        for name, value in (("num_layers", num_layers), ("num_slots", num_slots)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"GDNCache: `{name}` is {value!r} of type {type(value).__name__}, expected an int.")
            if value < 1:
                raise ValueError(f"GDNCache: `{name}` is {value}, expected at least 1.")
        try:
            device = torch.get_default_device() if device is None else torch.device(device)
        except (TypeError, RuntimeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"GDNCache: `device` is {device!r}, expected a torch device, as 'cpu' or 'cuda:0'.") from error
        self.config, self.num_layers, self.num_slots = config, int(num_layers), int(num_slots)
        conv = (num_layers, num_slots, config.conv_dim, config.conv_state_len)
        ssm = (
            num_layers,
            num_slots * (config.mtp_step + 1),
            config.tp_num_v_heads,
            config.head_k_dim,
            config.head_v_dim,
        )
        # Inference tensors could not be updated outside inference mode: the pools are none, wherever they are made.
        with torch.inference_mode(False):
            self.state: GDNState = _state(
                torch.zeros(conv, dtype=getattr(torch, config.conv_dtype), device=device),
                torch.zeros(ssm, dtype=getattr(torch, config.ssm_dtype), device=device),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of both pools."""
        return sum(pool.nbytes for pool in self._pools())

    @property
    def device(self) -> torch.device:
        """Where the pools are."""
        return self._pools()[0].device

    def layer(self, i: int) -> GDNState:
        """Views of layer `i`: conv `[num_slots, D, W - 1 + S]`, ssm `[num_slots * (S + 1), HV, K, V]`.

        Raises:
            TypeError: `i` is no int; ValueError: outside `[0, L)`.
        """
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise TypeError(f"GDNCache.layer: `i` is {i!r} of type {type(i).__name__}, expected an int.")
        if not 0 <= i < self.num_layers:
            raise ValueError(f"GDNCache.layer: `i` is {i}, expected 0 to {self.num_layers - 1}.")
        return _state(*(pool[int(i)] for pool in self._pools()))

    def reset(self, slots: Slots) -> None:
        """Zeroes all rows of the named request slots, in every layer. Reads `slots` on the host.

        Args:
            slots: integers `[M]`; one outside the pool is skipped.

        Raises:
            TypeError: no integers; ValueError: not one-dimensional, or a tensor without memory to read.

        Example:
            >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
            >>> cache = GDNCache(config, num_layers=1, num_slots=2, device="cpu")
            >>> conv = cache.layer(0).conv.fill_(1)
            >>> cache.reset([1, -1])
            >>> conv[:, 0, 0].tolist()
            [1.0, 0.0]
        """
        index = self._slots("reset", "slots", slots)
        index = index[self._inside(index)]
        for pool in self._requests():
            pool[:, index] = 0

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copies all rows of the requests `src_slots` to `dst_slots`, in every layer: a prefix that requests share.

        Every source is read before any slot is written.

        Args:
            src_slots: integers `[M]`.
            dst_slots: integers `[M]`, no slot twice; a pair with either slot outside the pool is skipped.

        Raises:
            TypeError: no integers; ValueError: not one-dimensional, or of different lengths.
        """
        src, dst = self._slots("copy", "src_slots", src_slots), self._slots("copy", "dst_slots", dst_slots)
        if src.shape != dst.shape:
            raise ValueError(
                f"GDNCache.copy: `dst_slots` has {len(dst)} slots, expected {len(src)} as `src_slots` has."
            )
        inside = self._inside(src) & self._inside(dst)
        src, dst = src[inside], dst[inside]
        for pool in self._requests():
            pool[:, dst] = pool[:, src]

    def to(self, device: torch.device | str) -> Self:
        """A copy of the cache on a device."""
        other = type(self)(self.config, self.num_layers, self.num_slots, device=device)
        other.load_state_dict(self.state_dict())
        return other

    def state_dict(self) -> dict[str, Tensor]:
        """The two pools by name, not copied, for `torch.save`."""
        return dict(zip(GDNState._fields, self._pools()))

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies the pools of another cache of the same sizes into this one, in place.

        Raises:
            TypeError: no mapping of tensors.
            ValueError: other names, shapes or dtypes, or a tensor without memory to read; nothing has been written
                in either case.
        """
        where, own = "GDNCache.load_state_dict", self.state_dict()
        dlpack.check_modes(where)
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"{where}: `state_dict` is of type {type(state_dict).__name__}, expected a mapping.")
        if set(state_dict) != set(own):
            raise ValueError(f"{where}: the names are {sorted(map(str, state_dict))}, expected {sorted(own)}.")
        for name, pool in own.items():
            given, label = state_dict[name], f"state_dict[{name!r}]"
            dlpack.check_readable(where, label, given)
            if (given.shape, given.dtype) != (pool.shape, pool.dtype):
                raise ValueError(
                    f"{where}: `{label}` is {given.dtype}{list(given.shape)}, expected {pool.dtype}{list(pool.shape)}."
                )
        for name, pool in own.items():
            pool.copy_(state_dict[name].detach())

    def _pools(self) -> tuple[Any, Any]:
        """The two tensors; `Any`, because `GDNState` is annotated with JAX arrays."""
        return self.state.conv, self.state.ssm

    def _requests(self) -> tuple[Tensor, Tensor]:
        """Both pools with one row a request: `[L, num_slots, …]`."""
        conv, ssm = self._pools()
        return conv, ssm.unflatten(1, (self.num_slots, self.config.mtp_step + 1))

    def _slots(self, function: str, name: str, slots: Slots) -> Tensor:
        """Slots as int64 on the pools' device."""
        where = f"GDNCache.{function}"
        dlpack.check_modes(where)
        if isinstance(slots, Tensor):
            dlpack.check_readable(where, name, slots)
            given, index = slots.dtype, slots
        elif isinstance(slots, np.ndarray | Sequence):
            try:
                index = np.array(slots, dtype=None if len(slots) else np.int64)
            except ValueError as error:
                raise ValueError(f"{where}: `{name}` is ragged, expected shape (M,).") from error
            given = index.dtype
        else:
            raise TypeError(f"{where}: `{name}` is of type {type(slots).__name__}, expected a sequence of integers.")
        if given not in _INTEGERS:
            raise TypeError(f"{where}: `{name}` has dtype {given}, expected integers.")
        if index.ndim != 1:
            raise ValueError(f"{where}: `{name}` has shape {tuple(index.shape)}, expected (M,).")
        index = index if isinstance(index, Tensor) else torch.from_numpy(index)
        return index.to(self.device, torch.int64)  # uint64 beyond int64 turns negative: outside the pool all the same

    def _inside(self, index: Tensor) -> Tensor:
        return (index >= 0) & (index < self.num_slots)


def _state(conv: Any, ssm: Any) -> GDNState:
    """A `GDNState` of torch tensors, which its annotation does not foresee."""
    return GDNState(conv, ssm)
