"""The versions of vLLM that the plug-in was tried with."""

from __future__ import annotations

from types import MappingProxyType

import weightstream

# Major and minor version -> where tests/integrations/vllm ran with it.
TRIED = MappingProxyType({"0.24": "GPU", "0.26": "GPU", "0.32": "CPU", "0.33": "CPU"})


def why_untried(version: str) -> str | None:
    """A warning for engines of a version of vLLM that was not tried; None if it was."""
    if ".".join(version.split(".")[:2]) in TRIED:
        return None
    tried = ", ".join(f"{number} ({where})" for number, where in TRIED.items())
    return (
        f"vLLM {version} was not tried with weightstream {weightstream.__version__}, only {tried}: compare tokens with "
        "an engine without offload before you rely on it"
    )
