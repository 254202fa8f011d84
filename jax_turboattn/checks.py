"""The one place where errors about arguments are formatted.

Text: `<function>: <argument> must <rule>, got <value>[; <what to do>]`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def value_error(function: str, argument: str, rule: str, got: Any, hint: str = "") -> ValueError:
    return ValueError(_text(function, argument, rule, got, hint))


def type_error(function: str, argument: str, rule: str, got: Any, hint: str = "") -> TypeError:
    return TypeError(_text(function, argument, rule, got, hint))


def _text(function, argument, rule, got, hint):
    return f"{function}: {argument} must {rule}, got {got}" + (f"; {hint}" if hint else "")


def as_array(function: str, argument: str, x: Any) -> jax.Array | np.ndarray:
    """`x` with a shape and a dtype: arrays pass, Python numbers and lists become jax arrays."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise type_error(function, argument, "be an array", type(x).__name__) from None


class Dims:
    """The axis sizes of one call, collected as its arguments are checked.

    `axes` is a string of axis names; a name seen before must have its size, a new name is bound, a number is literal.
    """

    def __init__(self, function: str):
        self.function = function
        self.sizes: dict[str, int] = {}
        self.sources: dict[str, str] = {}

    def __getitem__(self, axis: str) -> int:
        return self.sizes[axis]

    def bind(self, axis: str, size: int, source: str) -> None:
        self.sizes[axis], self.sources[axis] = size, source

    def check(self, argument: str, x: Any, axes: str) -> None:
        """Raises ValueError unless x.shape fits `axes`."""
        names = axes.split()
        shape = tuple(x.shape)
        if len(shape) != len(names):
            raise value_error(self.function, argument, f"have {len(names)} axes ({', '.join(names)})", shape)
        wanted, wrong = [], []
        for name, size in zip(names, shape):
            want = int(name) if name.isdigit() else self.sizes.get(name)
            wanted.append("*" if want is None else str(want))
            if want is not None and want != size:
                wrong.append(name)
        if wrong:
            origins = [f"{n} comes from {self.sources[n]}" for n in wrong if n in self.sources]
            rule = f"have shape ({', '.join(names)}) = ({', '.join(wanted)})"
            raise value_error(self.function, argument, rule, shape, ", ".join(dict.fromkeys(origins)))
        for i, (name, size) in enumerate(zip(names, shape)):
            if not name.isdigit() and name not in self.sizes:
                self.bind(name, size, f"{argument}.shape[{i}]")

    def index(self, argument: str, x: Any, axes: str) -> jax.Array:
        """An int32 array of these axes. Other dtypes are a TypeError: a silent cast would hide wrapped 64-bit values."""
        x = as_array(self.function, argument, x)
        if x.dtype != jnp.int32:
            hint = f"cast it with {argument}.astype(jnp.int32)"
            raise type_error(self.function, argument, "have dtype int32", x.dtype, hint)
        self.check(argument, x, axes)
        return jnp.asarray(x)

    def floating(self, argument: str, x: Any, axes: str, dtype: Any = None) -> jax.Array:
        """A floating array of these axes, cast to `dtype` when given."""
        x = as_array(self.function, argument, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise type_error(self.function, argument, "have a floating dtype", x.dtype)
        self.check(argument, x, axes)
        return jnp.asarray(x) if dtype is None else jnp.asarray(x).astype(dtype)

    def positive(self, axis: str) -> None:
        """Raises ValueError unless size(axis) >= 1."""
        if self[axis] < 1:
            raise value_error(self.function, axis, "be >= 1", f"{self[axis]} ({self.sources[axis]})")

    def divides(self, small: str, large: str) -> None:
        """Raises ValueError unless size(small) divides size(large)."""
        if self[small] == 0 or self[large] % self[small]:
            raise ValueError(
                f"{self.function}: {large} must be a multiple of {small}, got {large} = {self[large]} "
                f"({self.sources[large]}) and {small} = {self[small]} ({self.sources[small]})"
            )


def same_dtype(function: str, argument: str, x: Any, dtype: Any, source: str) -> None:
    if x.dtype != dtype:
        raise value_error(function, argument, f"have {source}'s dtype {jnp.dtype(dtype).name}", jnp.dtype(x.dtype).name)


def one_of(function: str, argument: str, value: Any, allowed) -> None:
    if value not in allowed:
        raise value_error(function, argument, f"be one of {', '.join(map(repr, allowed))}", repr(value))


def static_int(function: str, argument: str, value: Any, minimum: int) -> int:
    """A Python integer >= minimum. Traced values are a TypeError: the argument shapes the program."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise type_error(function, argument, "be a Python int (it is static)", type(value).__name__)
    if value < minimum:
        raise value_error(function, argument, f"be >= {minimum}", int(value))
    return int(value)


def static_float(function: str, argument: str, value: Any) -> float:
    """A finite Python float."""
    if isinstance(value, (bool, jax.core.Tracer)) or not isinstance(value, (int, float, np.number)):
        if not (isinstance(value, jax.Array) and value.ndim == 0 and not isinstance(value, jax.core.Tracer)):
            raise type_error(function, argument, "be a Python number (it is static)", type(value).__name__)
    if isinstance(value, (complex, np.complexfloating)):
        raise type_error(function, argument, "be a real number", value)
    try:
        number = float(value)
    except OverflowError:  # an int beyond float64
        number = np.inf
    # Kernels compute in float32: what overflows there is not finite.
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise value_error(function, argument, "be finite in float32", value)
    return number


def fits_int32(function: str, argument: str, value: int) -> int:
    """`value`, a Python integer, unless a silent wrap would make another number of it."""
    if not -(2**31) <= value < 2**31:
        raise value_error(function, argument, "fit int32", value)
    return int(value)


def dtype_of(function: str, argument: str, dtype: Any) -> np.dtype:
    """`dtype` as numpy's; TypeError for what is none."""
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise type_error(function, argument, "be a dtype", repr(dtype)) from None


def static_bool(function: str, argument: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise type_error(function, argument, "be a bool (it is static)", type(value).__name__)
    return bool(value)
