"""Code for a process of its own that counts the kernels which Triton would compile for a GPU."""

from __future__ import annotations

COMPILES_NOTHING = """
import json, torch, triton
from triton.backends.compiler import GPUTarget

class Driver:  # of a GPU that compiles nothing and launches nothing
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

def compiled(*, key, fn, **facts):
    found.add((fn.name, key))
    return True

found = set()
triton.runtime.driver.set_active(Driver())
triton.knobs.runtime.jit_cache_hook = compiled
"""

PRINTS_COUNTS = """
names = [name.rpartition(".")[2] for name, _ in found]
print(json.dumps({name: names.count(name) for name in names}))
"""
