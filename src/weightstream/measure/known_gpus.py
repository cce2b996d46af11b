"""Profiles of GPUs by name, for plans of machines that nobody has measured. Measures nothing.

Memory, bandwidth and arithmetic are those of NVIDIA's public data sheets and architecture papers, for dense bfloat16
with sums in float32. A kernel reaches a share of them, and the shares are those of an H200 that was measured: it reads
3.7 of 4.8 TB/s, multiplies at 684 of 989 TFLOP/s, decompresses bfloat16 at 1.83 TB/s, and copies 55.4 of 63 GB/s.
Fixed costs of kernels and of the host are the assumed ones of `CUDA_PROFILE`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from weightstream.errors import ConfigError
from weightstream.plan.manifest import Profile, decode_rate
from weightstream.runtime.devices.cuda import CUDA_PROFILE
from weightstream.settings.speeds import Link

_GIGA, _TERA = 1e9, 1e12
# What a process may use of the memory: ECC, the CUDA context and a desktop take the rest [L40S: 44.4 of 48 GiB].
_USABLE = 0.92
_FASTER = 1.25  # some name the rate of PCIe itself, which copies do not reach
_READS = 0.77  # share of the bandwidth of device memory
_MULTIPLIES = 0.7  # share of the arithmetic, in large products
_ATTENDS = 0.5  # the same in fused attention
_DECODES = MappingProxyType({"bfloat16": 0.38, "float16": 0.35, "float8_e4m3fn": 0.25})  # of the bandwidth
_LINK = re.compile(r"[\s,(]+(pcie\s*(?:gen\s*)?\d.*?)\)?\s*$", re.IGNORECASE)  # after a name
_WORDS = re.compile(r"\d+gb|[a-z0-9]+")
_SPACED_UNIT = re.compile(r"(?<=\d)\s+(?=gb\b)")
_NOISE = frozenset({"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm4", "sxm5", "hbm2e", "hbm3", "hbm3e"})


class _Sheet(NamedTuple):
    """Figures of a data sheet: GiB, GB/s, dense TFLOP/s in bfloat16 and in float32, and the generation of PCIe.

    `measured` are fields of the profile that were measured on such a GPU.
    """

    memory_gib: int
    bandwidth_gbps: float
    half_tflops: float
    single_tflops: float
    pcie: int
    measured: Mapping[str, Any] = MappingProxyType({})


_SHEETS: Mapping[str, _Sheet] = MappingProxyType(
    {
        # NVIDIA Ampere GA102 GPU architecture, V2
        "RTX 3090": _Sheet(24, 936, 71, 35.6, 4),
        # NVIDIA Ada GPU architecture, V2
        "RTX 4080": _Sheet(16, 716.8, 97.5, 48.7, 4),
        "RTX 4090": _Sheet(24, 1008, 165.2, 82.6, 4),
        # NVIDIA RTX Blackwell GPU architecture
        "RTX 5080": _Sheet(16, 960, 112.6, 56.3, 5),
        "RTX 5090": _Sheet(32, 1792, 209.5, 104.8, 5),
        # Data sheets of the products; A100 and H100 are those in SXM modules
        "A10": _Sheet(24, 600, 125, 31.2, 4),
        "A100 40GB": _Sheet(40, 1555, 312, 19.5, 4),
        "A100 80GB": _Sheet(80, 2039, 312, 19.5, 4),
        "L4": _Sheet(24, 300, 121, 30.3, 4),
        "L40S": _Sheet(48, 864, 362, 91.6, 4),
        "H100": _Sheet(80, 3350, 989, 67, 5, MappingProxyType({"link_bytes_per_s": 55.0e9})),
        "H200": _Sheet(
            141,
            4800,
            989,
            67,
            5,
            MappingProxyType(
                {
                    "link_bytes_per_s": 55.4e9,
                    "device_bytes_per_s": 3.7e12,
                    "half_flops_per_s": 684e12,
                    "decode_bfloat16_bytes_per_s": 1.83e12,
                    "op_s": 1.45e-6,
                    "product_s": 4.8e-6,
                    "op_launch_s": 14.5e-6,
                    "handover_s": 6e-6,
                    "device_nbytes": 139 << 30,
                }
            ),
        ),
    }
)


def known_gpu(name: str, link: str | None = None) -> Profile:
    """The profile of a GPU by name, such as "RTX 4090", "4090" or "RTX 4090 (PCIe 3)".

    Args:
        name: the name, as on the box or as the driver reports it.
        link: its link, as for `Link.parse`. Default: 16 lanes of the newest PCIe that it has.

    Raises:
        ConfigError: the name is that of no GPU here, or of several, and the text lists those that there are.
    """
    if in_name := _LINK.search(name):
        if link is not None:
            raise ConfigError(f"gpu = {name!r} names a link: leave that out, or link = {link!r}")
        name, link = name[: in_name.start()], in_name[1]
    keys = _matching(name)
    if len(keys) != 1:
        near = difflib.get_close_matches(name.upper().strip(), _SHEETS, n=1)
        meant = f"; did you mean {' or '.join(keys or near)}?" if keys or near else "."
        raise ConfigError(
            f"gpu = {name!r}: there is no such profile{meant} There are {', '.join(_SHEETS)}. For any other GPU run "
            "`weightstream doctor --save FILE` on its machine, and pass profile=FILE"
        )
    sheet, on = _SHEETS[keys[0]], None if link is None else Link.parse(link)
    usual = Link.of_pcie(sheet.pcie)
    fields: dict[str, Any] = {
        "link_bytes_per_s": usual.bytes_per_s,
        "device_bytes_per_s": _READS * sheet.bandwidth_gbps * _GIGA,
        "half_flops_per_s": _MULTIPLIES * sheet.half_tflops * _TERA,
        "single_flops_per_s": _MULTIPLIES * sheet.single_tflops * _TERA,
        "attention_flops_per_s": _ATTENDS * sheet.half_tflops * _TERA,
        "device_nbytes": int(_USABLE * (sheet.memory_gib << 30)),
        "assumed_from": "data sheet and measurements" if sheet.measured else "data sheet",
    }
    fields |= {decode_rate(dtype): share * sheet.bandwidth_gbps * _GIGA for dtype, share in _DECODES.items()}
    fields |= sheet.measured
    if on is not None and on != usual:
        if on.bytes_per_s > _FASTER * usual.bytes_per_s:
            raise ConfigError(f"link: {on.text} is faster than that of {keys[0]}, {usual.text}")
        fields["link_bytes_per_s"] = on.bytes_per_s
    return replace(CUDA_PROFILE, machine=f"{keys[0]}, {(on or usual).text}", **fields)


def _matching(name: str) -> list[str]:
    """The names of data sheets that a name may mean: the model, and the memory if it is named."""
    words = set(_WORDS.findall(_SPACED_UNIT.sub("", name.lower()).replace("rtx", " "))) - _NOISE
    found = []
    for key, sheet in _SHEETS.items():
        model = key.removeprefix("RTX ").split()[0].lower()
        if words - {f"{sheet.memory_gib}gb"} == {model}:
            found.append(key)
    return found
