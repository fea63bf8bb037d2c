"""What accelerators can do at most: published peaks of dense matmuls, by device kind and type.

TFLOP/s of one device as JAX counts devices (a chip of a TPU, a GPU), without sparsity, from the makers' data sheets:

- TPU: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm (v4, v5e, v5p, v6e), bfloat16;
- GPU: the data sheets of A100, H100 (SXM and PCIe), H200 and HGX B200. Float16 is as fast as bfloat16. The figure for
  float32 is that of TF32, in which JAX multiplies float32 on these GPUs unless told otherwise.

No figure is published for float32 on TPUs, and none means anything for a CPU.
"""

_HALF, _SINGLE = "half", "single"
_CLASS = {"bfloat16": _HALF, "float16": _HALF, "float32": _SINGLE}

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("TPU v6 lite", {_HALF: 918.0}),
    ("TPU v6e", {_HALF: 918.0}),
    ("TPU v5 lite", {_HALF: 197.0}),
    ("TPU v5e", {_HALF: 197.0}),
    ("TPU v5p", {_HALF: 459.0}),
    ("TPU v5", {_HALF: 459.0}),
    ("TPU v4", {_HALF: 275.0}),
    ("B200", {_HALF: 2250.0, _SINGLE: 1125.0}),
    ("H200", {_HALF: 989.0, _SINGLE: 494.0}),
    ("H100 PCIe", {_HALF: 756.0, _SINGLE: 378.0}),
    ("H100", {_HALF: 989.0, _SINGLE: 494.0}),
    ("A100", {_HALF: 312.0, _SINGLE: 156.0}),
)
"""A part of ``jax.Device.device_kind`` -> TFLOP/s by class of type; the first that fits counts."""

UNLIKE = ("TPU v4 lite", "GB200", "H100 NVL")
"""Kinds that contain one of those names and are another device."""


def published_peak(device_kind: str, dtype: str) -> float | None:
    """FLOP/s that one device of this kind is said to reach in matmuls of this type; None where none is known."""
    if any(name in device_kind for name in UNLIKE):
        return None
    for name, figures in PEAKS:
        if name in device_kind:
            tera = figures.get(_CLASS.get(dtype, ""))
            return None if tera is None else tera * 1e12
    return None
