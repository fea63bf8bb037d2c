"""Asks jax for its devices, in a process of its own: a backend may crash, hang or take a device's memory.

``python -m spmd_distill.doctor.probe`` prints one line, ``MARK`` and a JSON object: ``backend``, ``devices`` (how
many), ``kind``, ``memory`` (bytes of a device, or null), ``x64``, ``layouts`` (names of those that fit).
"""

import json

MARK = "spmd-distill devices: "


def main() -> None:
    """Print what jax sees."""
    from spmd_distill.runtime import prepare_jax

    prepare_jax()
    import jax

    from spmd_distill.sharding import layout_names

    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    found = {
        "backend": jax.default_backend(),
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "memory": stats.get("bytes_limit"),
        "x64": jax.config.read("jax_enable_x64"),
        "layouts": layout_names(len(devices)),
    }
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
